"""Static experts recorded in a CUDA graph; what the graph computes is compared as everywhere (`static_cases.py`)."""

from __future__ import annotations

import pytest
import torch
from static_cases import DTYPES, faults, make

from moe_course.cuda_graph import capture_cuda_graph
from moe_course.errors import BackendUnavailable


def test_without_a_gpu_a_cuda_graph_is_refused():
    with pytest.raises(BackendUnavailable, match="hidden_states is on cpu.*NVIDIA GPU.*CapturedExperts"):
        capture_cuda_graph(*make(4, [1, 2]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU for a CUDA graph")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cuda_graph_replays_with_other_counts(dtype):
    recorded = capture_cuda_graph(*(tensor.cuda() for tensor in make(7, [0] * 4, dtype)))
    for counts in ([3, 0, 7, 1], [0, 0, 0, 0], [7, 7, 7, 7], [0, 1, 0, 6]):
        rows, counts, _, _ = make(7, counts, dtype)
        recorded.hidden_states.copy_(rows)
        recorded.expert_num_tokens.copy_(counts)
        outputs = recorded.replay().cpu()
        inputs = (rows, counts, *(weight.cpu() for weight in recorded.weights))
        assert faults(lambda *_, outputs=outputs: outputs, inputs) == []
