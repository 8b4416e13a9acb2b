"""Hugging Face's model as a shell around our sparse layers.

The shell is built on the meta device, so nothing is allocated twice; its MoE blocks are replaced by `MoELayer`,
and only the tensors this rank owns are read. Nothing may stay uninitialised. Built in: notebook 03.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_course.backends.configure import Backend, configure
from moe_course.comm.base import Comm
from moe_course.config import MoEConfig
from moe_course.errors import CheckpointError, ConfigError
from moe_course.expert_map import Placement
from moe_course.glm.architecture import ARCHITECTURES, model_class
from moe_course.glm.checkpoint import LoadReport, Reader, check_index, expert_shapes, read_index
from moe_course.layer import MoELayer
from moe_course.modes import Mode, make_mode
from moe_course.parallel import Plan
from moe_course.stages import Stages

#: Routing fields that this package and transformers read from the same file.
READ_BY_BOTH = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_shared_experts",
)


class SparseBlock(nn.Module):
    """Stands where the shell had its MoE block: `[B, S, H]` in and out, pad rows left out of everything.

    `live` is a bool mask `[B * S]` of the rows that are tokens, set before each pass; None means all.
    """

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.layer = layer
        self.live: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # [B*S, H]
        if self.live is None:
            return self.layer(rows).view_as(hidden_states)
        output = torch.zeros_like(rows)
        output[self.live] = self.layer(rows[self.live])
        return output.view_as(hidden_states)


@dataclass
class LoadedModel:
    """A model ready to run on this rank."""

    shell: nn.Module
    config: MoEConfig
    blocks: list[SparseBlock]
    report: LoadReport
    params: int  # elements held by this rank, experts included
    expert_bytes: int  # bytes of w13 and w2 held by this rank
    device: torch.device
    mode: Mode
    capacity: int | None = None  # rows a rank may bring to one pass, where the backend has fixed places


def load(
    model_dir: str | Path,
    comm: Comm,
    plan: Plan,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    stages: Stages | None = None,
    on_event: Callable[..., Any] | None = None,
    backend: Backend | None = None,
    held: Placement | None = None,
    check: bool = True,
) -> LoadedModel:
    """Build the shell and read this rank's share of a checkpoint.

    Args:
        model_dir: folder with config.json and safetensors, one file or sharded.
        comm: all ranks of the plan; split here into the groups it needs, so every rank must call it.
        plan: modes, placement and backend.
        dtype: dtype of everything but the router, which stays in fp32.
        backend: how rows travel, with its options; None: the plan's, without any.
        held, check: for drills. Read experts by another placement than the plan's; take a checkpoint with missing
            experts as it is, as vLLM does, and compute with whatever the memory holds.

    Raises:
        ConfigError: an architecture this package cannot run.
        CheckpointError: quantised weights, or a checkpoint that does not fit its config.
    """
    folder, device = Path(model_dir), torch.device(device)
    config = MoEConfig.from_pretrained(folder)
    check_supported(config, folder)
    index = read_index(folder)
    shell = _build_shell(folder, config)
    expected = {name: tuple(tensor.shape) for name, tensor in shell.state_dict().items() if ".mlp.experts." not in name}
    needed = expected | expert_shapes(config)
    if not check:
        needed = {name: shape for name, shape in needed.items() if name in index or name in expected}
    ignored = check_index(index, needed, config.num_hidden_layers)

    reader, mode = Reader(index), make_mode(plan, comm)
    if backend is None:
        backend = configure(plan.backend.name)
    blocks = []
    for number in config.sparse_layers:
        layer = _read_layer(reader, config, number, mode, plan, dtype, device, stages, on_event, held, backend)
        blocks.append(SparseBlock(layer))
        shell.model.layers[number].mlp = blocks[-1]
    tensors = {name: reader.read(name).to(device, dtype) for name in shell.state_dict()}
    shell.load_state_dict(tensors, strict=True, assign=True)
    _rebuild_buffers(shell, device)
    report = reader.finish(ignored)
    shell.eval().requires_grad_(False)
    experts = [tensor for block in blocks for tensor in (block.layer.w13, block.layer.w2)]
    outside = [tensor for block in blocks for tensor in _replicated(block.layer)]
    params = sum(tensor.numel() for tensor in [*tensors.values(), *experts, *outside])
    expert_bytes = sum(tensor.numel() * tensor.element_size() for tensor in experts)
    capacity = getattr(backend, "capacity", None)
    return LoadedModel(shell, config, blocks, report, params, expert_bytes, device, mode, capacity)


def check_supported(config: MoEConfig, folder: Path) -> None:
    """Raise if this package cannot run the model: ConfigError (architecture) or CheckpointError (quantised)."""
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder}: architecture {config.architecture!r} is not supported, known: {', '.join(ARCHITECTURES)}"
        )
    if config.quantization:
        raise CheckpointError(
            f"{folder}: quantised checkpoint ({config.quantization}); this package reads fp32, fp16 and bf16 weights"
        )


def _build_shell(folder: Path, config: MoEConfig) -> nn.Module:
    of_transformers = model_class(config.architecture)
    raw = json.loads((folder / "config.json").read_text())
    try:
        hf_config = of_transformers.config_class.from_dict(raw)
        with torch.device("meta"):
            shell = of_transformers(hf_config)
    except Exception as error:  # whatever transformers makes of a config it cannot use
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{folder}: transformers cannot build {config.architecture} from this config: {reason}"
        ) from None
    _check_same_reading(folder, config, shell)
    return shell


def _check_same_reading(folder: Path, config: MoEConfig, shell: nn.Module) -> None:
    """What is read two ways is refused: `moe_layer_freq`, or a `model_type` of another family than the architecture."""
    for name in READ_BY_BOTH:
        ours, theirs = getattr(config, name), getattr(shell.config, name, None)
        if theirs is not None and ours != theirs:
            raise ConfigError(
                f"{folder}: config.json leaves {name} open; it is {ours} here and {theirs} in transformers"
            )
    sparse = tuple(i for i, layer in enumerate(shell.model.layers) if hasattr(layer.mlp, "gate"))
    if sparse != config.sparse_layers:
        raise ConfigError(
            f"{folder}: config.json leaves the sparse layers open; they are {list(config.sparse_layers)} here and "
            f"{list(sparse)} in transformers; add mlp_layer_types or first_k_dense_replace"
        )


def _read_layer(reader, config, number, mode, plan, dtype, device, stages, on_event, held, backend) -> MoELayer:
    prefix = f"model.layers.{number}.mlp"
    experts, shard = (held or plan.placement).experts_of(mode.ep_rank), (mode.moe_tp_rank, mode.moe_tp_size)
    w13, w2 = reader.read_experts(config, number, experts, dtype, shard)
    shared = None
    if config.n_shared_experts:
        gate, up, down = (reader.read(f"{prefix}.shared_experts.{p}_proj.weight") for p in ("gate", "up", "down"))
        shared = (torch.cat([gate, up]).to(device, dtype), down.to(device, dtype))
    bias = reader.read(f"{prefix}.gate.e_score_correction_bias") if config.has_correction_bias else None
    return MoELayer(
        config,
        plan.placement,
        mode.dispatch,
        backend,
        mode=mode,
        gate_weight=reader.read(f"{prefix}.gate.weight").to(device, torch.float32),
        bias=None if bias is None else bias.to(device, torch.float32),
        w13=w13.to(device),
        w2=w2.to(device),
        shared=shared,
        stages=stages,
        layer=number,
        on_event=on_event,
    )


def _replicated(layer: MoELayer) -> list[torch.Tensor]:
    return [tensor for tensor in (layer.gate_weight, layer.bias, *(layer.shared or ())) if tensor is not None]


def _rebuild_buffers(shell: nn.Module, device: torch.device) -> None:
    """Compute the buffers no checkpoint holds (`inv_freq`) again: on the meta device they have no values.

    Raises CheckpointError if anything is left without values.
    """
    rotary = shell.model.rotary_emb
    shell.model.rotary_emb = type(rotary)(config=shell.config).to(device)
    empty = [name for name, tensor in (*shell.named_parameters(), *shell.named_buffers()) if tensor.is_meta]
    if empty:
        raise CheckpointError(f"never initialised: {', '.join(empty)}")
