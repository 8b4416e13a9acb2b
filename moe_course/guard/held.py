"""What a rank really holds, read off its weights: each tensor against the bytes of the file.

A tensor that differs is searched for in the file, so that the finding says what it is and not only what it is not.

Built in: notebook 05. Used by `guard/audit.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import torch

from moe_course.glm.model import LoadedModel
from moe_course.guard.raw_checkpoint import ALL, RawCheckpoint
from moe_course.layer import MoELayer
from moe_course.parallel import Plan


class Held:
    """Findings of one rank.

    Attributes:
        experts: layer -> `(expert, slice)` of each row of `w13`, by content. A damaged row counts as what it should be.
        problems: what differs from the file, in words.
    """

    def __init__(self, model: LoadedModel, file: RawCheckpoint, plan: Plan, rank: int):
        self.model, self.file, self.placement, self.rank = model, file, plan.placement, rank
        mine = plan.rank(rank)
        self.layers = mine.layers
        self.owner = mine.ep_rank if plan.moe.use_ep else 0
        self.part, self.parts = (0, 1) if plan.moe.use_ep else (mine.ep_rank, plan.moe.tp_size)
        self.experts: dict[int, list[tuple[int, int]]] = {}
        self.problems: list[str] = []
        self.buffers = 0

    def look(self) -> Held:
        """Compare everything: sparse layers, the shell's tensors, its computed buffers."""
        layers = {block.layer.layer: block.layer for block in self.model.blocks}
        if missing := [number for number in self.layers if number not in layers]:
            self.problems.append(f"rank {self.rank}: sparse layers {missing} are not loaded")
        for number in self.layers:
            if number in layers:
                self._layer(number, layers[number])
        shell = self.model.shell
        tensors = shell.state_dict()
        dtype = next((layer.w13.dtype for layer in layers.values()), shell.lm_head.weight.dtype)
        for name, tensor in tensors.items():
            self._named(f"rank {self.rank}: {name}", tensor, [name], dtype)
        for name, buffer in shell.named_buffers():
            if name not in tensors:
                self._computed(f"rank {self.rank}: {name}", name, buffer)
                self.buffers += 1
        return self

    # -- a sparse layer -----------------------------------------------------------------------------------------

    def _layer(self, number: int, layer: MoELayer) -> None:
        where, prefix = f"rank {self.rank}, layer {number}:", f"model.layers.{number}.mlp"
        owner, local = self.placement.owner.tolist(), self.placement.local.tolist()
        planned = {local[e]: e for e in range(len(owner)) if owner[e] == self.owner}  # row -> global id
        search, self.experts[number] = _Search(self, number, layer.w13.dtype), []
        for kind, tensor in (("w13", layer.w13), ("w2", layer.w2)):
            if len(tensor) != len(planned):
                self.problems.append(f"{where} {kind} has {len(tensor)} experts, should have {len(planned)}")
        for row, (w13, w2) in enumerate(zip(layer.w13, layer.w2, strict=False)):
            really = self._expert(f"{where} row {row} of", w13, w2, planned.get(row), search)
            self.experts[number] += [] if really is None else [really]
        gate, up, down = (f"{prefix}.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down"))
        w13, w2 = (None, None) if layer.shared is None else layer.shared
        for what, tensor, names, dtype in (
            ("gate_weight", layer.gate_weight, [f"{prefix}.gate.weight"], torch.float32),
            ("bias", layer.bias, [f"{prefix}.gate.e_score_correction_bias"], torch.float32),
            ("shared w13", w13, [gate, up], layer.w13.dtype),
            ("shared w2", w2, [down], layer.w13.dtype),
        ):
            if tensor is not None:
                self._named(f"{where} {what}", tensor, names, dtype)
            elif names[0] in self.file:
                self.problems.append(f"{where} {what} is not loaded, the checkpoint has {names[0]}")

    def _expert(
        self, place: str, w13: torch.Tensor, w2: torch.Tensor, expert: int | None, search: _Search
    ) -> tuple[int, int] | None:
        """Compare one row of `w13` and `w2`; returns the expert and the slice that `w13` really holds."""
        if expert is not None and (absent := search.absent(expert)):
            self.problems.append(f"{place} w13 and w2 should be expert {expert}, the checkpoint has no {absent[0]}")
            return None
        really = None if expert is None else (expert, self.part)
        should = "nothing" if really is None else search.words(*really)
        wanted = (None, None) if really is None else search.expert(search.number, *really)
        for kind, loaded, tensor in (("w13", w13, wanted[0]), ("w2", w2, wanted[1])):
            difference = "is something unknown" if tensor is None else _difference(loaded, tensor)
            if difference is None:
                continue
            found = search.find(loaded, expert)
            words = difference if found is None else f"is {found[1]}"
            self.problems.append(f"{place} {kind} should be {should} and {words}")
            if found is not None and kind == "w13":
                really = found[0]
        return really

    # -- tensors every rank holds ---------------------------------------------------------------------------------

    def _named(self, place: str, loaded: torch.Tensor, names: list[str], dtype: torch.dtype) -> None:
        """Compare with one tensor of the file, or with several, one below the other."""
        if absent := [name for name in names if name not in self.file]:
            self.problems.append(f"{place} comes from nowhere: the checkpoint has no {absent[0]}")
            return
        difference = _difference(loaded, self._read(names, dtype))
        if difference is None:
            return
        for other, words in _elsewhere(names, self.model.config.num_hidden_layers):
            if all(name in self.file for name in other) and _difference(loaded, self._read(other, dtype)) is None:
                difference = f"is not that of the file, it is {words}"
                break
        self.problems.append(f"{place} {difference}")

    def _read(self, names: list[str], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([self.file.read(name) for name in names]).to(dtype)

    def _computed(self, place: str, name: str, buffer: torch.Tensor) -> None:
        """A buffer that no file holds must be one that can be computed again."""
        if not name.endswith("inv_freq"):
            self.problems.append(f"{place} is in no checkpoint, and how to compute it is not known here")
        elif buffer.is_meta:
            self.problems.append(f"{place} has no values: it is still on the meta device")
        elif buffer.shape != (wanted := _inv_freq(self.model.shell.config)).shape:
            self.problems.append(f"{place} has shape {list(buffer.shape)}, should have {list(wanted.shape)}")
        elif not torch.allclose(buffer.double().cpu(), wanted, rtol=1e-6, atol=0):
            at = int((buffer.double().cpu() - wanted).abs().nan_to_num(torch.inf).argmax())
            self.problems.append(f"{place} is {float(buffer[at]):g} at [{at}], should be {float(wanted[at]):g}")


class _Search:
    """The experts of one layer of the file: by name, and once something is amiss, by content."""

    def __init__(self, held: Held, number: int, dtype: torch.dtype):
        self.held, self.number, self.dtype = held, number, dtype
        self._by_content: dict[bytes, tuple[tuple[int, int], str]] = {}

    def words(self, expert: int, part: int) -> str:
        return f"expert {expert}" + (f" (slice {part} of {self.held.parts})" if self.held.parts > 1 else "")

    def names(self, number: int, expert: int) -> list[str]:
        return [f"model.layers.{number}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]

    def absent(self, expert: int, number: int | None = None) -> list[str]:
        """Names of this expert that the checkpoint lacks, in this layer or another."""
        names = self.names(self.number if number is None else number, expert)
        return [name for name in names if name not in self.held.file]

    def expert(self, number: int, expert: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`w13 [2I, H]` and `w2 [H, I]` of the file, of one slice where experts are cut."""
        file, inter = self.held.file, self.held.model.config.moe_intermediate_size // self.held.parts
        mine = slice(part * inter, (part + 1) * inter) if self.held.parts > 1 else ALL
        gate, up, down = self.names(number, expert)
        w13 = torch.cat([file.read(gate, rows=mine), file.read(up, rows=mine)]).to(self.dtype)
        return w13, file.read(down, columns=mine).to(self.dtype)

    def find(self, loaded: torch.Tensor, expert: int | None) -> tuple[tuple[int, int] | None, str] | None:
        """`((expert, slice), words)` of what equals these weights; of another layer only the same expert is tried."""
        held = self.held
        if loaded.is_meta:
            return None
        if not self._by_content:
            for part in range(held.parts):
                for other in range(held.placement.num_experts):
                    if self.absent(other):
                        continue
                    w13, w2 = self.expert(self.number, other, part)
                    swapped, words = torch.cat(w13.chunk(2)[::-1]), self.words(other, part)
                    for tensor, how in ((w13, ""), (w2, ""), (swapped, " with up rows before gate rows")):
                        self._by_content.setdefault(_digest(tensor), ((other, part), words + how))
        if found := self._by_content.get(_digest(loaded)):
            return found
        for number in held.layers if expert is not None else []:
            if not self.absent(expert, number) and any(
                _digest(loaded) == _digest(tensor) for tensor in self.expert(number, expert, held.part)
            ):
                return None, f"{self.words(expert, held.part)} of layer {number}"
        return None


def _difference(loaded: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """In what a tensor differs from the file, in words; None if in nothing."""
    if loaded.is_meta:
        return "has no values: it is still on the meta device"
    if loaded.shape != wanted.shape or loaded.dtype != wanted.dtype:
        return f"is {list(loaded.shape)} {loaded.dtype}, should be {list(wanted.shape)} {wanted.dtype}"
    wanted = wanted.to(loaded.device)
    same = torch.equal(loaded, wanted)
    if same and (not loaded.numel() or all(end.isfinite() for end in loaded.aminmax())):  # NaN equals nothing
        return None
    if not loaded.isfinite().all():
        at = (~loaded.isfinite()).nonzero()[0].tolist()
        return f"holds {loaded[tuple(at)]:g} at {at}, the file has {wanted[tuple(at)]:g}"
    unequal = (loaded != wanted).nonzero()
    at = unequal[0].tolist()
    return (
        f"differs from the file in {len(unequal)} of {loaded.numel()} numbers, first at {at}: "
        f"{loaded[tuple(at)]:g}, should be {wanted[tuple(at)]:g}"
    )


def _elsewhere(names: list[str], layers: int) -> Iterable[tuple[list[str], str]]:
    """What a tensor might be instead: its halves in the wrong order, the same of another layer."""
    if len(names) > 1:
        yield names[::-1], "its parts in the wrong order"
    for number in range(layers if ".layers." in names[0] else 0):
        yield [re.sub(r"\.layers\.\d+\.", f".layers.{number}.", name) for name in names], f"that of layer {number}"


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy(), digest_size=16).digest()


def _inv_freq(config: Any) -> torch.Tensor:
    """The rotary frequencies, float64, from the config alone; of scaled variants, as transformers computes them."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)[0].double()
    width = getattr(config, "qk_rope_head_dim", None)  # latent attention turns only these columns
    if width is None:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(head * rope.get("partial_rotary_factor", 1.0))
    return rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
