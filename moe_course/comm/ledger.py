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

    `received` is counted by the receiver, layer by layer and from what arrived: over all ranks it must equal the rows
    sent. A layer of -1 is what ranks agree on outside of layers, such as whether a text has ended.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int, int, int], Entry] = defaultdict(Entry)
        self.received: dict[int, int] = defaultdict(int)  # layer -> rows

    def add(self, op: str, layer: int, src: int, dst: int, entry: Entry) -> None:
        self.entries[op, layer, src, dst].add(entry)

    def receive(self, layer: int, rows: int) -> None:
        self.received[layer] += rows

    @property
    def rows_received(self) -> int:
        """Rows that came, in all layers and outside of them."""
        return sum(self.received.values())

    def of_layers(self) -> Ledger:
        """What the layers moved, without what ranks agreed on outside of them."""
        inside = Ledger()
        inside.entries.update((key, entry) for key, entry in self.entries.items() if key[1] >= 0)
        inside.received.update((layer, rows) for layer, rows in self.received.items() if layer >= 0)
        return inside

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
            for layer, rows in ledger.received.items():
                merged.received[layer] += rows
            for key, entry in ledger.entries.items():
                merged.entries[key].add(entry)
        return merged
