"""A real run small enough for a cell: the tiny model on ranks that are threads of this kernel.

It gives what pictures and measurements of a lesson need: the trace, and the rows that entered each sparse layer. Real
processes come in notebook 13; the routes are the same ones. Built in: notebook 07.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from moe_course.stages import Stages
    from moe_course.trace import Trace


@dataclass(frozen=True)
class Rehearsal:
    """What was seen.

    Attributes:
        trace: of all ranks.
        rows: `(step, layer)` -> for each rank the rows `[T, H]` fp32 that it brought to the layer.
        topk_ids: the same keys; `[T, K]` int32, the experts they wanted.
        texts: how each prompt goes on.
    """

    trace: Trace
    rows: dict[tuple[int, int], list[torch.Tensor]]
    topk_ids: dict[tuple[int, int], list[torch.Tensor]]
    texts: list[str]


def rehearse(
    prompts: Sequence[str], world_size: int, max_new_tokens: int = 2, stages: Stages | None = None
) -> Rehearsal:
    """Run `prompts` on `world_size` ranks with expert parallelism, dispatch by all-gather. A rank may have no prompt.

    Args:
        stages: other stages than the package's, right or wrong.

    Raises what a run raises: ConfigError, for example, when there is no prompt.
    """
    from moe_course.comm.sim import run_threads
    from moe_course.job import prepare
    from moe_course.options import RunOptions
    from moe_course.trace.meta import describe
    from moe_course.trace.trace import Trace, write_joined, write_rank

    options = RunOptions(
        prompts=tuple(prompts), world_size=world_size, max_new_tokens=max_new_tokens, device="cpu", dtype="float32"
    )
    job = prepare(options)
    with tempfile.TemporaryDirectory(prefix="moe-course-rehearsal-") as folder:
        path = Path(folder) / "trace"

        def on_rank(comm) -> dict[str, Any]:
            recorder, seen, found = _one_rank(job, comm, stages)
            write_rank(path, comm.rank, recorder, {})
            return found | {"seen": seen}

        everybody = run_threads(world_size, on_rank)
        exact = all(part["exact"] for part in everybody)
        meta = describe(job, everybody, exact) | {"transport": "threads"}
        if stages is not None:  # they may leave routes out
            meta["options"]["stages"] = repr(stages)
        write_joined(path, meta)
        trace = Trace.load(path)
    passes = sorted(everybody[0]["seen"])
    both = [{key: [part["seen"][key][place] for part in everybody] for key in passes} for place in (0, 1)]
    return Rehearsal(trace, *both, [job.tokenizer.decode(tokens) for tokens in trace.meta["new_tokens"]])


def _one_rank(
    job, comm, stages
) -> tuple[Any, dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]], dict[str, Any]]:
    """Its recorder; its rows and ids of each pass through each layer; what `describe` asks for."""
    from moe_course.glm.generate import generate
    from moe_course.glm.model import load
    from moe_course.trace.record import Recorder

    recorder, seen = Recorder(), {}

    def watch(stage: str, layer, **tensors: torch.Tensor) -> None:
        recorder(stage, layer, **tensors)
        if stage == "route":
            seen[comm.step, layer.layer] = (tensors["hidden_states"].clone(), tensors["topk_ids"].clone())

    model = load(job.options.model, comm, job.plan, stages=stages, on_event=watch, backend=job.backend)
    recorder.watch(model)
    exact = model.blocks[0].layer.row_invariance().exact
    generations, timing = generate(model, job.mine(comm.rank), job.options.max_new_tokens, on_pass=recorder.on_pass)
    return recorder, seen, {"generations": generations, "timing": timing, "exact": exact}
