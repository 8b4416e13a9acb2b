"""Experts whose tensors keep their shapes from step to step: compiled once for each size, never again.

A low-latency backend hands over `[E_local, C, H]` and one count per expert. The counts change in every step, the
shapes do not, as long as counts only ever choose values and never sizes. Then nothing has to wait for the device,
`torch.compile` sees one graph, and the kernels can be recorded in a CUDA graph (`moe_course/cuda_graph.py`).

Source: vLLM `BatchedTritonExperts` (layout), `CudagraphDispatcher` (round up to a captured size) and
`TorchCompileWithNoGuardsWrapper` (compile once, then drop torch's guards). Built in: notebook 10.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType

import torch
import torch.nn.functional as F

from moe_course.dispatch import Dispatched
from moe_course.errors import BackendUnavailable, CapacityExceeded, ConfigError
from moe_course.quant import dequantize


def static_experts(
    hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """`w2(silu(w1 x) * (w3 x))` for every slot of every expert, by two batched products.

    Args:
        hidden_states: `[E_local, C, H]`, model dtype; slots of expert e from `expert_num_tokens[e]` on hold anything,
            NaN and Inf included.
        expert_num_tokens: `[E_local]` int32 on the same device, each 0 … C. Not checked: a look would be a wait.
        w13: `[E_local, 2I, H]`, gate rows first; w2: `[E_local, H, I]`.

    Returns:
        `[E_local, C, H]` unweighted outputs, model dtype. Slots beyond a count are exactly 0.

    The work is that of full slots: `E_local * C` rows, however few are real. Rows agree with `grouped_swiglu` to
    1e-5 (fp32), and are not promised to be equal to the bit: there each expert's rows are padded to a small
    multiple, here all C slots enter one `bmm`, and for another number of rows a library may add up a product's terms
    in another order. On the CPU where this was measured they were equal for C of 13 and more, and often not for C of
    8 and less.
    """
    slot = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    unused = slot >= expert_num_tokens.unsqueeze(1)  # [E_local, C]
    gate, up = torch.bmm(hidden_states, w13.transpose(1, 2)).chunk(2, dim=-1)
    outputs = torch.bmm(F.silu(gate) * up, w2.transpose(1, 2))
    # A row of a product depends on no other row, so one mask at the end is enough, and it also covers an expert
    # whose weights are not loaded yet. It must choose, not multiply: NaN * 0 is NaN. Not `torch.where(…, 0)`: that
    # copies the 0 to the device, which a CUDA graph being recorded does not allow.
    return outputs.masked_fill(unused.unsqueeze(-1), 0)


class CapturedExperts:
    """The `experts` stage of layout "padded", compiled beforehand for a set of capacities.

    Use it as `Stages(experts=CapturedExperts([R * T_max], rank=rank))`, one object per rank. The first layer that
    calls it compiles all sizes, unless `capture` has; after that nothing is compiled, whatever the counts, the layer
    or the gradient mode. A step with C slots is padded to the smallest captured size that holds them.

    Args:
        capture_sizes: slots per expert, like vLLM's `cudagraph_capture_sizes`; order and repeats do not matter.
        rank: named in errors.
        experts: what to compile, with the signature of `static_experts`.
        backend: of torch.compile, a name or a function. "aot_eager" traces and runs the same kernels, so the bits
            stay those of `static_experts`, and it needs no compiler. "inductor" writes fused kernels with other last
            bits; its first size takes 10 to 30 s on a small CPU. See `missing_for_inductor`.

    Attributes:
        capture_sizes: ascending tuple.

    Raises:
        ConfigError: no size, or one below 1.
    """

    def __init__(
        self,
        capture_sizes: Iterable[int],
        *,
        rank: int = 0,
        experts: Callable[..., torch.Tensor] = static_experts,
        backend: str | Callable = "aot_eager",
    ):
        self.capture_sizes = tuple(sorted(set(capture_sizes)))
        if not self.capture_sizes or self.capture_sizes[0] < 1:
            raise ConfigError(
                f"rank {rank}: capture_sizes are {self.capture_sizes}, expected at least one size, each 1 or more"
            )
        self.rank, self.experts, self.backend = rank, experts, backend
        self._graphs: dict[tuple, dict[int, Callable]] = {}  # by layout of the weights, then by capacity

    def capture(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Compile every size for weights of these shapes, by a step without rows. Once more for other shapes.

        Raises:
            ConfigError: experts that need values to know their shapes or their way.
            BackendUnavailable: backend "inductor" without a compiler.
        """
        missing = missing_for_inductor(w13.device) if self.backend == "inductor" else None
        if missing is not None:
            raise BackendUnavailable(f"rank {self.rank}: backend 'inductor' needs {missing}; or use 'aot_eager'")
        graphs = {}
        for size in self.capture_sizes:
            rows, counts = w13.new_zeros(len(w13), size, w13.shape[2]), w13.new_zeros(len(w13), dtype=torch.int32)
            self._check_static(rows, counts, w13, w2)
            graphs[size] = _compiled(self.experts, size, self.backend)
            _run(graphs[size], rows, counts, w13, w2)
        self._graphs[_layout(w13, w2)] = graphs

    def capacity_for(self, slots: int) -> int:
        """The smallest captured size that holds `slots`; CapacityExceeded if there is none.

        vLLM runs such a batch without a graph instead. Here a step that is suddenly slow, or suddenly compiles,
        would look like a hang to its peers.
        """
        for size in self.capture_sizes:
            if size >= slots:
                return size
        raise CapacityExceeded(
            f"rank {self.rank}: {slots} slots per expert (EP ranks * T_max), captured sizes are {self.capture_sizes}; "
            f"capture a size of at least {slots}, or lower --max-num-batched-tokens"
        )

    def __call__(
        self, dispatched: Dispatched, w13: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[E_local, C, H]` raw outputs in the model's dtype; zero beyond each count. `expert_map` is not needed.

        Quantised rows (with `scales`) are first brought to the dtype of the weights.

        Raises:
            ConfigError: another layout, weights still to apply, or tensors unlike those that were captured.
            CapacityExceeded: more slots than the largest captured size.
        """
        self._check_layout(dispatched)
        rows, counts = dispatched.hidden_states, dispatched.expert_num_tokens
        if dispatched.scales is not None:
            rows = dequantize(rows, dispatched.scales, w13.dtype)
        self._check_tensors(rows, counts, w13, w2)
        slots = rows.shape[1]
        size = self.capacity_for(slots)
        if not self._graphs:
            self.capture(w13, w2)
        # compiled kernels may rely on strides and on the integer type, and no guard of torch looks at them any more
        if size != slots:
            rows = F.pad(rows, (0, 0, 0, size - slots))
        graph = self._graphs[_layout(w13, w2)][size]
        return _run(graph, rows.contiguous(), counts.to(torch.int32), w13, w2)[:, :slots]

    def _check_static(self, *tensors: torch.Tensor) -> None:
        # fullgraph=True refuses a branch on a value, but takes a size from one as a symbol (torch 2.13, `one_graph` in
        # torch/_dynamo/output_graph.py), and such a graph waits for the device. Meta tensors have shapes and no values.
        try:
            with torch.no_grad():
                self.experts(*(tensor.to("meta") for tensor in tensors))
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"rank {self.rank}: {self.experts.__name__} cannot run on shapes alone ({str(error).splitlines()[0]}), "
                "expected shapes that do not depend on counts or rows; choose by a mask, not by an index or a branch"
            ) from error

    def _check_layout(self, dispatched: Dispatched) -> None:
        for name, found, expected in (
            ("layout", dispatched.layout, "padded"),
            ("expert_num_tokens", "None" if dispatched.expert_num_tokens is None else "counts", "counts"),
            ("topk_weights", "None" if dispatched.topk_weights is None else "weights", "None"),
        ):
            if found != expected:
                raise ConfigError(
                    f"rank {self.rank}: {name} is {found!r}, expected {expected!r}; static shapes need "
                    "--all2all-backend deepep_low_latency"
                )

    def _check_tensors(self, rows: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> None:
        for name, found, expected in (
            ("rows of", (rows.shape[0], rows.shape[2], rows.dtype), (len(w13), w13.shape[2], w13.dtype)),
            ("expert_num_tokens of", tuple(counts.shape), (len(w13),)),
        ):
            if found != expected:
                raise ConfigError(f"rank {self.rank}: {name} {found}, expected {expected}, as the weights have it")
        layout = _layout(w13, w2)
        if self._graphs and layout not in self._graphs:
            raise ConfigError(
                f"rank {self.rank}: weights of {layout}, captured are {list(self._graphs)}; "
                "call capture(w13, w2) before the first step"
            )


def missing_for_inductor(device: torch.device) -> str | None:
    """What `backend="inductor"` lacks for tensors on this device, in words; None if nothing.

    CPU kernels need a C++ compiler (`CXX`, else g++, on macOS clang++) and Python's headers; GPU kernels Triton.
    """
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "Triton (pip install triton)"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        return f"a C++ compiler, {compiler!r} is not here (apt install g++, or set CXX)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h (apt install python3-dev)"
    return None


def _layout(w13: torch.Tensor, w2: torch.Tensor) -> tuple:
    """Everything of the weights that a graph was compiled for."""
    return tuple((tuple(w.shape), w.stride(), w.dtype, str(w.device)) for w in (w13, w2))


def _run(graph: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # traced and run in one mode, whatever the caller's
        return graph(*tensors)


def _compiled(experts: Callable[..., torch.Tensor], size: int, backend: str | Callable) -> Callable[..., torch.Tensor]:
    """The function, to be compiled at its first call and at no other."""
    # torch keeps graphs by code object and allows few for each: every size gets a code object of its own
    code = experts.__code__.replace(co_name=f"{experts.__name__}_{size}")
    own = FunctionType(code, experts.__globals__, code.co_name, experts.__defaults__, experts.__closure__)
    # guards would compile again for a Parameter, in inference mode, after set_num_threads; our checks replace them
    no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=no_guards)
