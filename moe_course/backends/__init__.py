"""How rows travel: one module per traffic shape, each with `dispatch`, `combine` and `CAPABILITIES`."""

from moe_course.backends import allgather_reducescatter, no_dp_ep

#: Backend name -> module.
BACKENDS = {"no_dp_ep": no_dp_ep, "allgather_reducescatter": allgather_reducescatter}
