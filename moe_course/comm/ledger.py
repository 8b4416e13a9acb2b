"""The ledger: bytes really given to the transport, by operation, layer, source and destination."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Entry:
    """What one rank gave the transport for one peer. Units: bytes, except `rows` and `messages`.

    payload: rows of hidden states or partial sums; padding: bytes that carry nothing; metadata: headers,
    expert ids, weights, counts.
    """

    payload: int = 0
    padding: int = 0
    metadata: int = 0
    rows: int = 0
    messages: int = 0

    def add(self, other: Entry) -> None:
        self.payload += other.payload
        self.padding += other.padding
        self.metadata += other.metadata
        self.rows += other.rows
        self.messages += other.messages


class Ledger:
    """Entries by `(op, layer, src, dst)`. A rank writes what it sends, so `src` is its own rank.

    `rows_received` is counted by the receiver, from what arrived: over all ranks it must equal the rows sent.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int, int, int], Entry] = defaultdict(Entry)
        self.rows_received = 0

    def add(self, op: str, layer: int, src: int, dst: int, entry: Entry) -> None:
        self.entries[op, layer, src, dst].add(entry)

    def total(self, op: str | None = None, layer: int | None = None) -> Entry:
        """Sum over entries, optionally of one operation or layer."""
        total = Entry()
        for (entry_op, entry_layer, _, _), entry in self.entries.items():
            if op in (None, entry_op) and layer in (None, entry_layer):
                total.add(entry)
        return total

    def as_rows(self) -> list[dict]:
        """One dictionary per entry, for JSON and tables."""
        keys = ("op", "layer", "src", "dst")
        return [dict(zip(keys, key, strict=True)) | vars(entry) for key, entry in sorted(self.entries.items())]

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """One ledger of all ranks."""
        merged = cls()
        for ledger in ledgers:
            merged.rows_received += ledger.rows_received
            for key, entry in ledger.entries.items():
                merged.entries[key].add(entry)
        return merged
