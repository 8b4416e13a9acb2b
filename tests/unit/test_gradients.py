"""Inference only: a gradient that would be lost on the way is refused, wherever rows travel or are rounded."""

from __future__ import annotations

import pytest
import torch
from backend_cases import SHAPES, backend
from layer_cases import make_batch, make_config, make_layer, make_weights

from moe_course import quant
from moe_course.backends import BACKENDS
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError
from moe_course.expert_map import make_placement
from moe_course.stages import Stages

CONFIG = make_config(10, 4, 64, 32)
WEIGHTS = make_weights(CONFIG, torch.float32)
SHARED = {"shared w13": WEIGHTS.shared[0].shape, "shared w2": WEIGHTS.shared[1].shape}
CURE = r"inference only; wrap the call in torch.inference_mode\(\)"


def asking(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def run(ranks: int, name: str, mode=torch.enable_grad, asks: str = "") -> list[torch.Tensor]:
    """The layer's outputs, with `requires_grad` on the tensor of that name."""
    placement, batch = make_placement(ranks, 10), make_batch([3, 2][:ranks], CONFIG, torch.float32, seed=1)

    def fn(comm):
        layer, rows = make_layer(WEIGHTS, placement, comm, backend(name)), batch.hidden_states[comm.rank]
        if asks.startswith("shared"):
            layer.shared = tuple(asking(w) if w.shape == SHARED[asks] else w for w in layer.shared)
        elif asks == "hidden_states":
            rows = asking(rows)
        elif asks:
            setattr(layer, asks, asking(getattr(layer, asks)))
        with mode():
            return layer(rows)

    return run_threads(ranks, fn)


@pytest.mark.parametrize("asks", ["hidden_states", "gate_weight", "bias", "w13", "w2", "shared w13", "shared w2"])
def test_the_layer_names_what_requires_grad(asks):
    """Before anything is computed, on one rank without any dispatch too; without gradient mode all is as it was."""
    for ranks, name in ((1, "no_dp_ep"), (2, "allgather_reducescatter")):
        with pytest.raises(ConfigError, match=rf"rank 0, layer 0: requires_grad is True for {asks} and .*{CURE}"):
            run(ranks, name, asks=asks)
        for mode in (torch.no_grad, torch.inference_mode):
            for ours, theirs in zip(run(ranks, name, mode, asks), run(ranks, name), strict=True):
                assert torch.equal(ours, theirs) and not ours.requires_grad


@pytest.mark.parametrize("leg", ["hidden_states", "topk_weights", "expert_output"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_exchange_of_a_backend_loses_a_gradient(name, leg):
    """Without the layer around it: refused, or, for weights that stay with their row, the gradient there is."""
    placement, batch = make_placement(2, 10), make_batch([3, 2], CONFIG, torch.float32, seed=1)

    def fn(comm):
        layer = make_layer(WEIGHTS, placement, comm, backend(name))
        rows, weights, ids = (part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids))
        rows, weights = (asking(t) if leg == n else t for n, t in (("hidden_states", rows), ("topk_weights", weights)))
        dispatched = backend(name).dispatch(rows, weights, ids, comm=comm, placement=placement)
        output = Stages().experts(dispatched, layer.w13, layer.w2, layer.expert_map)
        output = asking(output) if leg == "expert_output" else output
        routed = backend(name).combine(output, dispatched, comm=comm)
        (gradient,) = torch.autograd.grad(routed.sum(), weights)
        return float((gradient * weights).detach().sum()), float(routed.detach().sum())

    if leg == "topk_weights" and BACKENDS[name].CAPABILITIES["weights_applied_by"] != "experts":
        for by_gradient, output in run_threads(2, fn):  # the output is linear in the weights
            assert by_gradient == pytest.approx(output, rel=1e-4)
        return
    with pytest.raises(ConfigError, match=CURE):
        run_threads(2, fn)


@pytest.mark.parametrize(
    "call", ["all_reduce", "reduce_scatter_rows", "all_gather_rows", "all_to_all_rows", "all_to_all_views"]
)
def test_no_operation_of_a_group_loses_a_gradient(call):
    def fn(comm):
        counts = [[1, 1]] if call in ("reduce_scatter_rows", "all_to_all_rows", "all_to_all_views") else []
        getattr(comm, call)(asking(torch.randn(2, 4)), *counts)

    with pytest.raises(ConfigError, match=CURE):
        run_threads(2, fn)


@pytest.mark.parametrize("fmt", quant.FORMATS)
def test_rounding_has_no_gradient(fmt):
    """No row travels here, and no rank is in the message."""
    rows = torch.randn(3, 128)
    words = r"and gradient mode is on, but rounding has no gradient; wrap the call in torch.no_grad\(\)"
    with pytest.raises(ConfigError, match=f"^quantize to {fmt}: requires_grad is True for rows {words}$"):
        quant.quantize(asking(rows), fmt)
    with torch.no_grad():
        q, _ = quant.quantize(asking(rows), fmt)
    assert not q.requires_grad
