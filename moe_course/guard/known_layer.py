"""A small sparse layer whose output every rank knows to the bit, whatever the groups, the dtype and the order of sums.

Expert e writes 1, the bits of e and the bits of the row's number. The weights of a row's routes are different powers
of two, so an output column is a binary number with one digit for each route: lost, doubled, misplaced and wrongly
weighted contributions can be read off it. At most eight digits, so it is exact in bfloat16, too.

Built in: notebook 12. Used by `guard/canary.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.expert_map import Placement

GATE = 64.0  # silu(64) is 64 to the bit in float64, float32 and bfloat16
SHARED = 16.0  # what the shared expert adds in its column
MOST_ROUTES = 8  # digits of a bfloat16


@dataclass(frozen=True)
class KnownLayer:
    """What is fixed beforehand, the same on all ranks: whose rows go where, and what comes back.

    Attributes:
        placement: who owns which expert.
        slices: ranks that each expert is cut over; 1 with expert parallelism.
        holders: sets of rows; ranks that share rows count once.
        shared: is there a shared expert?

    Output columns: one for each slice, which counts arrivals; `ids`: the bits of the expert; `rows`: the bits of the
    row's number; then what the shared expert writes, from `extra`: `SHARED` and the row's number again. Slices take
    turns in writing the bits. Input columns: 1, and the bits of the row's number.
    """

    placement: Placement
    slices: int
    holders: int
    shared: bool

    @property
    def routes(self) -> int:
        return min(self.placement.num_experts, MOST_ROUTES)

    @property
    def kinds(self) -> int:
        """Kinds of rows, see `routing`: those that visit all experts, and three more."""
        return -(-self.placement.num_experts // self.routes) + 3

    @property
    def stride(self) -> int:
        """Row numbers set aside for each holder."""
        return self.kinds + 5

    @property
    def id_bits(self) -> int:
        return (self.placement.num_experts - 1).bit_length()

    @property
    def row_bits(self) -> int:
        return (self.holders * self.stride).bit_length()

    @property
    def ids(self) -> slice:
        return slice(self.slices, self.slices + self.id_bits)

    @property
    def rows(self) -> slice:
        return slice(self.ids.stop, self.ids.stop + self.row_bits)

    @property
    def extra(self) -> int:
        return self.rows.stop

    @property
    def hidden(self) -> int:
        """H. A multiple of 8, so that rows start on 16-byte boundaries."""
        return _up(self.extra + 1 + self.row_bits)

    @property
    def inter(self) -> int:
        """I of one slice."""
        return _up(1 + -(-self.row_bits // self.slices))

    def slice_of(self, columns: slice) -> torch.Tensor:
        """Which slice writes which of these columns."""
        return torch.arange(columns.stop - columns.start) % self.slices

    def column(self, column: int) -> str:
        """What a column of the output tells about its row, in words."""
        if column < self.slices:
            return "the sum of weights that arrived" + (f" from slice {column}" if self.slices > 1 else "")
        if column < self.ids.stop:
            return f"bit {column - self.ids.start} of its experts"
        if column < self.rows.stop:
            return f"bit {column - self.rows.start} of its number"
        if column == self.extra:
            return "the shared expert's part"
        if column <= self.extra + self.row_bits:
            return f"bit {column - self.extra - 1} of its number from the shared expert"
        return f"column {column}, which nobody writes,"

    def numbers(self, holder: int, share: int = 1, turn: int = 0) -> torch.Tensor:
        """Row numbers of one holder, `[n]`: ragged, for some holders none, and nothing `share` ranks split evenly.

        Who has none changes with `turn`: two turns leave nobody out.
        """
        n = 0 if (holder + turn) % 4 == 2 else self.kinds + (3 * holder + 1) % 4
        return holder * self.stride + torch.arange(n + (n > 0 and share > 1 and n % share == 0))

    def routing(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`topk_weights [n, K]` fp32 and `topk_ids [n, K]` int32 of rows.

        A holder's rows visit every expert, each row as many owners as it can. Then come a row with all routes to one
        owner, a row with a single route, and one with none.
        """
        local, owner = self.placement.local.long(), self.placement.owner.long()
        walk = (local * self.placement.ep_size + owner).argsort()  # neighbours have different owners
        ids = torch.full((len(numbers), self.routes), -1, dtype=torch.int32)
        for row, number in enumerate(numbers.tolist()):
            holder, kind = number // self.stride, number % self.stride % self.kinds
            if kind < self.kinds - 3:
                chosen = walk[kind * self.routes : (kind + 1) * self.routes].roll(holder)
            elif kind == self.kinds - 3:
                mine = self.placement.experts_of(holder % self.placement.ep_size)[: self.routes]
                chosen = torch.tensor(mine)
            else:
                chosen = walk[:0]
                ids[row, -1] = walk[holder % len(walk)] if kind == self.kinds - 2 else -1
            ids[row, : len(chosen)] = chosen.int()
        return 0.5 ** self.exponents(numbers), ids

    def exponents(self, numbers: torch.Tensor) -> torch.Tensor:
        """Route k weighs `2 ** -exponent`, and another power in the next row. `[n, K]`"""
        return (torch.arange(self.routes) + numbers.view(-1, 1)) % max(self.routes, 2)

    def inputs(self, numbers: torch.Tensor) -> torch.Tensor:
        """`[n, H]` float64."""
        rows = torch.zeros(len(numbers), self.hidden, dtype=torch.float64)
        rows[:, 0] = 1
        rows[:, 1 : 1 + self.row_bits] = bits(numbers, self.row_bits)
        return rows

    def numbers_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The inverse of `inputs`: `[n, H]` -> `[n]`."""
        return (inputs[:, 1 : 1 + self.row_bits].round().long().cpu() << torch.arange(self.row_bits)).sum(1)

    def routed(
        self, numbers: torch.Tensor, topk_weights: torch.Tensor | None = None, part: int | None = None
    ) -> torch.Tensor:
        """What comes back from the experts, `[n, H]` float64.

        Args:
            topk_weights: others than those of `routing`.
            part: only the contributions of this owner, or of this slice where experts are cut.
        """
        weights, ids = self.routing(numbers)
        factors = (weights if topk_weights is None else topk_weights).double() * (ids >= 0)  # [n, K]
        if part is not None and self.slices == 1:
            factors = factors * (self.placement.owner[ids.long()] == part)
        total = factors.sum(1, keepdim=True)
        out = torch.zeros(len(numbers), self.hidden, dtype=torch.float64)
        out[:, : self.slices] = total
        out[:, self.ids] = (factors.unsqueeze(2) * bits(ids.clamp(min=0), self.id_bits)).sum(1)
        out[:, self.rows] = total * bits(numbers, self.row_bits)
        if part is not None and self.slices > 1:
            for columns in (slice(0, self.slices), self.ids, self.rows):
                out[:, columns] *= self.slice_of(columns) == part
        return out

    def from_shared(self, numbers: torch.Tensor) -> torch.Tensor:
        """What the shared expert adds, `[n, H]` float64."""
        out = torch.zeros(len(numbers), self.hidden, dtype=torch.float64)
        if self.shared:
            out[:, self.extra] = SHARED
            out[:, self.extra + 1 : self.extra + 1 + self.row_bits] = bits(numbers, self.row_bits)
        return out

    def expert_weights(self, experts: list[int], part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`w13 [n, 2I, H]` and `w2 [n, H, I]`, float64, slice `part` of these experts."""
        w13 = torch.zeros(len(experts), 2 * self.inter, self.hidden, dtype=torch.float64)
        w2 = torch.zeros(len(experts), self.hidden, self.inter, dtype=torch.float64)
        w13[:, 0, 0], w13[:, self.inter, 0] = GATE, 1  # slot 0: silu(64) * 1
        w2[:, part, 0] = 1 / GATE
        mine = self.slice_of(self.ids) == part
        w2[:, self.ids, 0] = bits(torch.tensor(experts), self.id_bits) * mine / GATE
        for slot, bit in enumerate((self.slice_of(self.rows) == part).nonzero().flatten().tolist(), start=1):
            w13[:, slot, 0], w13[:, self.inter + slot, 1 + bit] = GATE, 1  # silu(64) * that bit of the input
            w2[:, self.rows.start + bit, slot] = 1 / GATE
        return w13, w2

    def shared_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The shared expert, whole on every rank: `w13 [2I, H]` and `w2 [H, I]`, float64."""
        inter = _up(1 + self.row_bits)
        w13 = torch.zeros(2 * inter, self.hidden, dtype=torch.float64)
        w2 = torch.zeros(self.hidden, inter, dtype=torch.float64)
        for slot in range(1 + self.row_bits):
            w13[slot, 0], w13[inter + slot, slot], w2[self.extra + slot, slot] = GATE, 1, 1 / GATE
        w2[self.extra, 0] = SHARED / GATE
        return w13, w2


def bits(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """`[…]` integers -> `[…, count]` zeros and ones, lowest bit first."""
    return (numbers.long().unsqueeze(-1) >> torch.arange(count)) & 1


def _up(n: int) -> int:
    return -(-n // 8) * 8
