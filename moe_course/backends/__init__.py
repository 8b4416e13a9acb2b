"""How rows travel: one module per traffic shape.

Each has `dispatch` and `combine` (the signatures of `stages.py`), `slots` (where a trace finds a row), `traffic` (what
a routing must move) and `CAPABILITIES`.
"""

from moe_course.backends import (
    all_to_all,
    allgather_reducescatter,
    high_throughput,
    low_latency,
    no_dp_ep,
    one_sided,
    two_hop,
)

#: Backend name -> module.
BACKENDS = {
    "no_dp_ep": no_dp_ep,
    "allgather_reducescatter": allgather_reducescatter,
    "all_to_all": all_to_all,
    "high_throughput": high_throughput,
    "low_latency": low_latency,
    "two_hop": two_hop,
    "one_sided": one_sided,
}
