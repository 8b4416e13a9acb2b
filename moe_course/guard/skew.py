"""Say when one rank does most of the work. Nothing fails then; everybody waits.

Source: vLLM `distributed/eplb` measures the same ratio, the other way up, as balancedness. Built in: notebook 09.
"""

from __future__ import annotations

LIMIT = 2.0  # routes of the busiest rank over the mean, from which on it is worth a word


def describe_skew(result: dict) -> str | None:
    """One sentence about a run's JSON, or None when its load is even enough."""
    routes, ratio = result["load"]["routes_per_rank"], result["load"]["max_over_mean"]
    if not routes or ratio is None or len(routes) < 2 or ratio < LIMIT:
        return None
    busiest = routes.index(max(routes))
    waits = [row["waited_s"] for row in result["ranks"] if row["ep_rank"] != busiest]
    spent = result["phases"]["prefill_s"] + result["phases"]["decode_s"]
    share = round(100 * max(routes) / sum(routes))
    return (
        f"rank {busiest}: skewed traffic: its experts computed {max(routes):,} of {sum(routes):,} routes ({share} %), "
        f"{ratio:.2f} x the mean; the other ranks spent {min(waits):.1f} to {max(waits):.1f} of {spent:.1f} s "
        "in exchanges"
    )
