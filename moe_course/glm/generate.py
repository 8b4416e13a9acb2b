"""Lock-step generation: every rank makes exactly one pass per step, with its own prompts or with none.

A rank's prompts form one left-padded batch. A rank without prompts still joins every sparse layer with zero
rows, because each of them is a meeting of all ranks. Built in: notebook 13.

Source: vLLM runs dummy batches on idle data-parallel ranks for the same reason (`DPEngineCoreProc`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_course.comm.base import Comm
from moe_course.errors import ExchangeMismatch
from moe_course.glm.model import LoadedModel


@dataclass
class Generation:
    """One prompt and what followed it."""

    index: int  # of the prompt, over all ranks
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # one `[V]` fp32 per token, if kept


@dataclass
class Timing:
    """Seconds this rank spent in passes, and tokens it put through them."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_passes: int = 1  # more when a prompt had to go in parts
    prefill_tokens: int = 0
    decode_tokens: int = 0


@torch.inference_mode()
def generate(
    model: LoadedModel,
    prompts: dict[int, list[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop_at_eos: bool = False,
    eos_token_id: int = 0,
    keep_logits: bool = False,
    on_token: Callable[[int, int], None] | None = None,
    on_pass: Callable[[int, torch.Tensor, list[tuple[int, int]]], None] | None = None,
    on_phase: Callable[[str, int], None] | None = None,
) -> tuple[list[Generation], Timing]:
    """Continue this rank's prompts by `max_new_tokens` tokens each. Every rank of the group must call it.

    Args:
        prompts: prompt index -> token ids; may be empty. Ranks that share rows (TP, PCP) are given the same ones.
        temperature: 0 is greedy; otherwise sampling, seeded by (seed, prompt index), the same for any rank count.
        stop_at_eos: end a prompt at `eos_token_id`; the group stops when all prompts have ended.
        on_token: called with (prompt index, token).
        on_pass: called before each pass with (pass, token ids `[T]` of the live rows, their (prompt, position)).
        on_phase: called with "prefill" and its number of passes, then with "decode" and the most it may need.

    Where a backend has fixed places (`model.capacity`), long prompts go through in parts of at most as many rows, and
    every rank makes as many passes as the one with the most.

    Returns:
        The generations in the order of `prompts`, and this rank's timing.
    """
    comm = model.blocks[0].layer.comm if model.blocks else None
    generations = [Generation(index, list(tokens)) for index, tokens in prompts.items()]
    generators = {g.index: torch.Generator().manual_seed(seed * 1_000_003 + g.index) for g in generations}
    batch = _Batch(model, generations)
    timing, ended = Timing(), set()
    began, parts = time.perf_counter(), batch.parts(model.capacity, comm)
    timing.prefill_passes = len(parts)
    if on_phase:
        on_phase("prefill", len(parts))
    logits = torch.empty(0, 0)  # [B, V] of the last position
    for number, columns in enumerate(parts):
        if columns is None:
            batch.join(number, comm, on_pass)
        else:
            logits, rows = batch.prompt_part(number, comm, columns, on_pass)
            timing.prefill_tokens += rows
    timing.prefill_s = time.perf_counter() - began
    if on_phase:
        on_phase("decode", max_new_tokens - 1)
    for step in range(max_new_tokens):
        if step:
            began = time.perf_counter()
            logits, rows = batch.next_token(len(parts) - 1 + step, comm, ended, on_pass)
            timing.decode_s += time.perf_counter() - began
            timing.decode_tokens += rows
        chosen = []
        for g, row in zip(generations, logits, strict=True):
            if g.index in ended:
                g.tokens.append(eos_token_id)  # keeps the batch rectangular; cut off below
                continue
            token = _choose(row, temperature, generators[g.index])
            g.tokens.append(token)
            chosen.append(token)
            if keep_logits:
                g.logits.append(row.float().cpu())
            if on_token:
                on_token(g.index, token)
            if stop_at_eos and token == eos_token_id:
                ended.add(g.index)
        for group in (model.mode.split, model.mode.reduce):
            agree_on_tokens(chosen, group, model.device)
        if stop_at_eos and comm is not None:
            comm.layer = -1  # outside the layers: not part of what they move
            going = torch.tensor([[len(generations) - len(ended)]], device=model.device)
            if int(comm.all_reduce(going)) == 0:
                break
    for g in generations:
        if stop_at_eos and eos_token_id in g.tokens:
            del g.tokens[g.tokens.index(eos_token_id) + 1 :]
    return generations, timing


def agree_on_tokens(tokens: list[int], group: Comm | None, device: torch.device) -> None:
    """Ranks that share their rows must choose the same tokens: the next step's rows follow from them.

    They do on equal processors. On others the last bits of the logits may differ, and with them a close choice; then
    rows of different texts would be added up. Not asked where headers are not compared either.

    Raises ExchangeMismatch on all ranks of the group.
    """
    if group is None:
        return
    group.layer = -1  # outside the layers: not part of what they move. On all ranks, also on those that return here
    if not group.shared.compare or not tokens:  # without prompts all of them have none
        return
    mine = torch.tensor([tokens], dtype=torch.int64, device=device).view(1, -1)  # [1, B]
    (seen,) = group.all_gather_rows(torch.empty(1, 0, device=device), mine).metadata  # no payload, only metadata
    differ = (seen != seen[0]).any(dim=1).nonzero().flatten().tolist()
    if differ:
        first, odd = group.members[0], group.members[differ[0]]
        raise ExchangeMismatch(
            f"step {group.step}: rank {first} chose tokens {seen[0].tolist()}, rank {odd} {seen[differ[0]].tolist()} "
            "for rows they share; use processors and libraries of one kind within a TP or PCP group"
        )


class _Batch:
    """The left-padded batch of one rank, its cache and its masks."""

    def __init__(self, model: LoadedModel, generations: list[Generation]):
        self.model, self.generations = model, generations
        self.cache = None
        if generations:
            from transformers import DynamicCache

            self.cache = DynamicCache(config=model.shell.config)
            self.longest = max(len(g.prompt_tokens) for g in generations)
            lengths = torch.tensor([len(g.prompt_tokens) for g in generations], device=model.device)
            columns = torch.arange(self.longest, device=model.device)
            self.mask = (columns >= self.longest - lengths.unsqueeze(1)).long()  # [B, S], 0 on the left padding

    def parts(self, capacity: int | None, comm: Comm | None) -> list[slice | None]:
        """Columns of the prompts for each pass, with at most `capacity` live rows; None: a pass with zero rows.

        All ranks make the same number of passes, so all must call this.
        """
        if capacity is None or comm is None:
            return [slice(0, self.longest)] if self.generations else [None]
        found: list[slice | None] = []
        first = rows = 0
        for column, live in enumerate(self.mask.sum(0).tolist() if self.generations else []):
            if rows + live > capacity:
                found.append(slice(first, column))
                first, rows = column, 0
            rows += live
        if self.generations:
            found.append(slice(first, self.longest))
        comm.layer = -1
        mine = torch.tensor([[len(found)]], device=self.model.device)
        most = int(comm.all_gather_rows(torch.empty(1, 0, device=self.model.device), mine).metadata[0].max())
        return found + [None] * (max(most, 1) - len(found))

    def prompt_part(self, number: int, comm: Comm | None, columns: slice, on_pass) -> tuple[torch.Tensor, int]:
        """A pass over these columns of the prompts: logits `[B, V]` of the last one, and the number of live rows."""
        padded = [[0] * (self.longest - len(g.prompt_tokens)) + g.prompt_tokens for g in self.generations]
        input_ids = torch.tensor(padded, device=self.model.device)[:, columns]
        mask = self.mask[:, : columns.stop]
        return self._advance(number, comm, input_ids, mask[:, columns].bool(), mask, on_pass)

    def next_token(self, number: int, comm: Comm | None, ended: set[int], on_pass) -> tuple[torch.Tensor, int]:
        """A pass over the tokens that were chosen last; prompts that have ended bring no row."""
        if not self.generations:
            self.join(number, comm, on_pass)
            return torch.empty(0, 0), 0
        input_ids = torch.tensor([[g.tokens[-1]] for g in self.generations], device=self.model.device)
        live = torch.tensor([[g.index not in ended] for g in self.generations], device=self.model.device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.generations), 1)], dim=1)
        return self._advance(number, comm, input_ids, live, self.mask, on_pass)

    def join(self, number: int, comm: Comm | None, on_pass) -> None:
        """A pass with zero rows. The shell cannot run on them, so its sparse layers are called in order without it."""
        if comm is not None:
            comm.step = number
        if on_pass:
            on_pass(number, torch.empty(0, dtype=torch.int64), [])
        for block in self.model.blocks:
            layer = block.layer
            layer(torch.empty(0, self.model.config.hidden_size, dtype=layer.w13.dtype, device=layer.w13.device))

    def _advance(self, number, comm, input_ids, live, mask, on_pass) -> tuple[torch.Tensor, int]:
        if comm is not None:
            comm.step = number
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]  # [B, S]
        for block in self.model.blocks:
            block.live = live.reshape(-1)
        if on_pass:
            prompts = torch.tensor([g.index for g in self.generations], device=live.device)
            prompts = prompts.unsqueeze(1).expand_as(live)
            places = zip(prompts[live].tolist(), positions[live].tolist(), strict=True)
            on_pass(number, input_ids[live], list(places))
        output = self.model.shell(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], int(live.sum())


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
