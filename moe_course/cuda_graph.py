"""Record the static experts once as a CUDA graph, then replay them with what the buffers hold by then.

A replay launches all kernels at once, on the same addresses, with the same sizes. So everything that changes from
step to step must be a value in a buffer: the rows, and the counts too.

Source: `torch.cuda.graph`; vLLM `CUDAGraphWrapper`. Built in: notebook 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_course.errors import BackendUnavailable
from moe_course.static_shapes import static_experts


@dataclass(frozen=True)
class RecordedExperts:
    """A CUDA graph and its buffers. Write into `hidden_states` and `expert_num_tokens` in place, then `replay`."""

    graph: torch.cuda.CUDAGraph
    hidden_states: torch.Tensor  # [E_local, C, H]
    expert_num_tokens: torch.Tensor  # [E_local] int32
    output: torch.Tensor  # [E_local, C, H], overwritten by every replay
    weights: tuple[torch.Tensor, torch.Tensor]  # held: the graph reads their addresses

    def replay(self) -> torch.Tensor:
        """Compute with what the buffers hold now. Returns `output`, valid until the next replay."""
        self.graph.replay()
        return self.output


def capture_cuda_graph(
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    experts: Callable[..., torch.Tensor] = static_experts,
    warmup_steps: int = 3,
) -> RecordedExperts:
    """Record `experts(hidden_states, expert_num_tokens, w13, w2)`; the tensors passed in become the graph's buffers.

    Args:
        hidden_states, expert_num_tokens, w13, w2: as for `static_experts`, all on one GPU.
        experts: what to record. It must neither wait for the device nor choose a size by data; CUDA refuses it
            otherwise.
        warmup_steps: runs before recording, in which libraries allocate what they may not allocate later.

    Raises:
        BackendUnavailable: tensors that are not on an NVIDIA GPU.
    """
    for name, tensor in (("hidden_states", hidden_states), ("expert_num_tokens", expert_num_tokens), ("w13", w13)):
        if tensor.device.type != "cuda":
            raise BackendUnavailable(
                f"{name} is on {tensor.device.type}, expected cuda: a CUDA graph needs an NVIDIA GPU; "
                "CapturedExperts gives the same fixed shapes here"
            )
    inputs = (hidden_states, expert_num_tokens, w13, w2)
    with torch.no_grad(), torch.cuda.device(hidden_states.device):
        aside = torch.cuda.Stream()  # warm-up must not run on the stream that others use
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(warmup_steps):
                experts(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = experts(*inputs)
    return RecordedExperts(graph, hidden_states, expert_num_tokens, output, (w13, w2))
