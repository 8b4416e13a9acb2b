"""A vendor's backend that nobody looked for at the start: its package is imported when the first row wants to travel.

What vLLM does for NIXL, and what a run without guard does here: a missing package shows late, in the middle of a
forward pass. Source: `all2all.py : NixlEPAll2AllManager` has no probe in its constructor. Built in: notebook 12.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

from moe_course.backends.select import VENDOR_PACKAGES
from moe_course.errors import BackendUnavailable

CAPABILITIES = {"output_is_reduced": True, "layout": "rows", "weights_applied_by": "experts"}


def unprobed(name: str) -> SimpleNamespace:
    """Stands where a backend module does. Its `dispatch` raises ModuleNotFoundError where the package is missing."""

    def dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement):
        import_module(VENDOR_PACKAGES[name])
        raise BackendUnavailable(f"the package {VENDOR_PACKAGES[name]} is here, and this version does not call it")

    return SimpleNamespace(CAPABILITIES=CAPABILITIES, dispatch=dispatch, combine=None)
