"""Who quantises when: before the rows travel, or where they arrive.

"before": codes and scales travel. "after": rows travel in the model's dtype, and each owner quantises what it got;
then "fp8_tensor" is one scale for the rows that arrived, not for those that one rank sent. Anything else is the
reason for a refusal.

The names are upstream's, with its rules; the module that stands in for a vendor's library follows them too.
Source: vLLM `prepare_finalize/*.py` and `all2all_utils.py`. Built in: notebook 10.
"""

from __future__ import annotations

from typing import Literal

from moe_course.errors import BackendUnavailable
from moe_course.quant.formats import FORMATS, format_named

_B, _A = "before", "after"
_NO_PER_TOKEN = "DeepEP high throughput quantises after the exchange, with one scale per tensor, never per token"
_MORI_SCALES = "MoRI sends one scale per token or per 128 numbers, and none per tensor"
_MORI_UE8M0 = "power-of-two scales belong to DeepGEMM on Blackwell, and MoRI runs on gfx942 and gfx950"
_ONE_SIDED = "FlashInfer one-sided has a fixed payload layout: fp8 with a scale per 128 numbers, MXFP8, NVFP4 or bf16"
_NO_INT8 = "no layout for int8 rows is known upstream for this backend"

#: Backend name -> format -> "before", "after", or why not. Columns in the order of `FORMATS`.
#: int8 is our own choice: where any bytes travel it goes before; where model-dtype rows travel and each one is
#: quantised by itself, after; where a vendor's kernel fixes the payload, not at all.
WHEN: dict[str, dict[str, str]] = {
    name: dict(zip(FORMATS, answers, strict=True))
    for name, answers in {
        #                               fp8_group, fp8_group_ue8m0, fp8_token, fp8_tensor, int8_token
        "no_dp_ep": (_B, _B, _B, _B, _B),  # nothing travels; `prepare` quantises what the experts read
        "allgather_reducescatter": (_B, _B, _B, _B, _B),
        "naive": (_B, _B, _B, _B, _B),
        "pplx": (_B, _B, _B, _B, _B),
        "deepep_high_throughput": (_B, _B, _NO_PER_TOKEN, _A, _NO_PER_TOKEN),
        "deepep_low_latency": (_B, _B, _A, _A, _A),  # groups: inside the dispatch kernel
        "deepep_v2": (_B, _B, _A, _A, _A),
        "mori_high_throughput": (_B, _MORI_UE8M0, _B, _MORI_SCALES, _NO_INT8),
        "mori_low_latency": (_B, _MORI_UE8M0, _B, _MORI_SCALES, _NO_INT8),
        "nixl_ep": (_B, _B, _A, _A, _A),
        "flashinfer_nvlink_one_sided": (_B, _B, _ONE_SIDED, _ONE_SIDED, _ONE_SIDED),
        "flashinfer_nvlink_two_sided": (_B, _B, _B, _B, _NO_INT8),
        "flashinfer_all2allv": (_B, _B, _B, _B, _NO_INT8),  # its old name
        "all_to_all": (_B, _B, _B, _B, _B),
        "two_hop": (_B, _B, _B, _B, _B),
    }.items()
}


def when(backend_name: str, fmt: str) -> Literal["before", "after"]:
    """When this backend quantises rows.

    Args:
        backend_name: a value of `--all2all-backend`, or "no_dp_ep".
        fmt: a name in `FORMATS`.

    Raises:
        ConfigError: unknown format.
        BackendUnavailable: unknown backend, or one that does not take this format, with the reason.
    """
    form = format_named(fmt)
    if backend_name not in WHEN:
        raise BackendUnavailable(f"all2all backend {backend_name!r} is not known, choose from: {', '.join(WHEN)}")
    answers = WHEN[backend_name]
    answer = answers[form.name]
    if answer in (_B, _A):
        return answer
    taken = ", ".join(name for name, given in answers.items() if given in (_B, _A))
    raise BackendUnavailable(f"all2all backend {backend_name!r} does not take {fmt} rows: {answer}; it takes {taken}")
