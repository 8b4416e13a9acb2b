"""The eight drills: what breaks, what upstream does about it, how it is brought about here.

Built in: notebook 12. Source of the eight rows and of what vLLM does: its code, by module path in each entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_course.options import TINY

_VENDOR = "--transport=vendor"
_SHORT = ["--prompt=def add(a, b):", "--max-new-tokens=24"]
_TP2_EP = ["--tensor-parallel-size=2", "--enable-expert-parallel"]
_LOST_EXPERTS = range(16)


@dataclass(frozen=True)
class Drill:
    """One failure mode.

    Attributes:
        title: the failure, in a few words.
        upstream: what vLLM does about it, with the module.
        fault: what this drill does.
        cure: what one would do about it for real.
        ranks: number of processes.
        arguments: folder for files of the drill -> arguments of the rank program.
        module: the rank program.
        check: compare with the one-process model, where a fault can go by in silence.
        says: parts of the first line of the diagnosis.
    """

    name: str
    title: str
    upstream: str
    fault: str
    cure: str
    ranks: int
    arguments: Callable[[Path], list[str]]
    says: tuple[str, ...]
    module: str = "moe_course.run"
    check: bool = False


def _without_experts(folder: Path) -> list[str]:
    """A copy of the small checkpoint that lacks the down projections of some experts of its first sparse layer."""
    from safetensors.torch import load_file, save_file

    from moe_course.config import MoEConfig

    model = folder / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(TINY / "model.safetensors")
    layer = MoEConfig.from_pretrained(TINY).sparse_layers[0]
    for expert in _LOST_EXPERTS:
        del tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return [f"--model={model}", f"--reference-model={TINY}", "--world-size=2", *_SHORT]


DRILLS = {
    drill.name: drill
    for drill in (
        Drill(
            "group-mismatch",
            "EP group mismatch",
            "Data-parallel engines compare a hash of their parallel configs at the start (v1/engine/utils.py). "
            "Ranks of one engine share one config; what differs all the same ends as a hang.",
            "Rank 0 is told DP 2 with EP, rank 1 is told TP 2 with EP.",
            "Start all ranks with the same command; the handshake compares every field.",
            2,
            lambda folder: [
                "--data-parallel-size=2", "--enable-expert-parallel", *_SHORT,
                "--override=1:tensor_parallel_size=2", "--override=1:data_parallel_size=1",
            ],
            ("rank 1", "tensor_parallel_size differs", "rank 1 has 2", "rank 0 has"),
        ),
        Drill(
            "missing-weights",
            "Missing expert weights",
            "A missing expert tensor is not noticed: the parameter keeps what the memory held "
            "(fused_moe/routed_experts.py, model_loader/default_loader.py).",
            f"The checkpoint lacks the down projections of experts {_LOST_EXPERTS[0]} to {_LOST_EXPERTS[-1]}.",
            "Fetch the checkpoint again; count (expert, projection) pairs, not files.",
            2,
            _without_experts,
            ("lacks", "mlp.experts.0.down_proj.weight", "12 more"),
            check=True,
        ),
        Drill(
            "placement",
            "Unsupported placement strategy",
            "Round robin that is not supported becomes linear, with a warning (expert_map_manager.py). The filter that "
            "decides which experts are read goes by the strategy asked for (ep_weight_filter.py), not by that one.",
            "Round robin is asked for and linear is in force; rank 0 reads its experts by what was asked for.",
            "One catalogue for everybody: resolve the placement once, and load by the result.",
            2,
            lambda folder: [
                "--world-size=2", *_SHORT,
                "--expert-placement-strategy=round_robin", "--fault=misplace@rank=0",
            ],
            ("layer 1: expert 1 is held by no rank", "should be held by rank 0"),
            check=True,
        ),
        Drill(
            "dependency",
            "Backend dependency missing",
            "Most managers assert that their package is there when they are built (device_communicators/all2all.py); "
            "NIXL's does not, and fails later. There is no fallback on CUDA.",
            "The library of deepep_high_throughput is asked for, on a machine without deep_ep.",
            "Install the package on every node, or choose a backend that needs none.",
            2,
            lambda folder: ["--world-size=2", *_SHORT, "--all2all-backend=deepep_high_throughput", _VENDOR],
            ("deepep_high_throughput", "deep_ep", "not installed"),
        ),
        Drill(
            "capacity",
            "Shape or capacity mismatch",
            "Backends with fixed buffers hold a maximum of rows per rank (deepep_ll.py); a captured graph holds one "
            "shape. What does not fit fails in the kernel, or was cut off before.",
            "Buffers are made for 8 rows per rank; rank 1 brings 9.",
            "Agree on the largest count before the exchange; make the buffers larger on all ranks, or send fewer rows.",
            2,
            lambda folder: [],
            ("rank 1", "9 rows", "T_max is 8"),
            module="moe_course.drills.capacity",
        ),
        Drill(
            "reduction",
            "Wrong reduction assumption",
            "Kernel, finalize step and model each say whether the sum is complete (output_is_reduced, "
            "moe_runner.py). Who says it wrongly gives twice the value, or a part of it, and no error.",
            "TP ranks hold partial sums of every row; they add them up twice.",
            "One owner for every sum; try it with a row whose result is known.",
            2,
            lambda folder: [*_TP2_EP, *_SHORT, "--fault=reduce-twice@rank=0", "--fault=reduce-twice@rank=1"],
            ("canary", "twice"),
            check=True,
        ),
        Drill(
            "pipeline",
            "Pipeline boundary",
            "Sequence-parallel residuals are switched off when there are pipeline stages "
            "(deepseek_v2.py : DeepseekV2DecoderLayer); the newer model asserts whole rows at both ends of a stage.",
            "Two stages of TP 2 x DP 2; the first hands on each TP rank's slice of the rows instead of all.",
            "Gather sequence-parallel rows before they leave a stage.",
            8,
            lambda folder: [],
            ("pipeline boundary", "3 rows", "expects 6", "sequence-parallel"),
            module="moe_course.drills.pipeline",
        ),
        Drill(
            "skew",
            "Skewed expert traffic",
            "No error: collectives wait for the slowest rank. Redundant experts and EPLB are the remedy "
            "(distributed/eplb).",
            "The router sends every row to experts of rank 3.",
            "Look at the load per rank; spread hot experts, or keep copies of them.",
            4,
            lambda folder: ["--world-size=4", "--max-new-tokens=8", "--fault=skew@rank=3"],
            ("rank 3", "skewed traffic", "100 %"),
        ),
    )
}  # fmt: skip
