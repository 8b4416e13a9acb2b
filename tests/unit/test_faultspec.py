"""Faults and overrides are read strictly: a typing error must not pass for a run without fault."""

from __future__ import annotations

import pytest

from moe_course.errors import ConfigError
from moe_course.guard.faultspec import KINDS, FaultSpec, parse_fault, parse_override


def test_a_fault_has_kind_rank_place_and_step():
    assert parse_fault("kill@rank=1,layer=2,stage=combine,step=3") == FaultSpec("kill", 1, 2, "combine", 3)
    assert parse_fault("sleep@rank=0,seconds=0.5") == FaultSpec("sleep", 0, None, "dispatch", 0, 0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode@rank=1", "explode"),
        ("kill", "rank is missing"),
        ("kill@layer=1", "rank is missing"),
        ("kill@rank=one", "rank=one"),
        ("kill@rank=1,stage=lunch", "lunch"),
        ("kill@rank=1,colour=red", "colour=red"),
    ],
)
def test_what_is_not_a_fault_is_refused(text, says):
    with pytest.raises(ConfigError, match="--fault") as error:
        parse_fault(text)
    assert says in str(error.value)
    assert all(kind in str(error.value) for kind in KINDS) or "explode" not in text


def test_overrides_are_json_or_text():
    assert parse_override("2:dtype=bfloat16") == (2, "dtype", "bfloat16")
    assert parse_override("0:seed=3") == (0, "seed", 3)
    assert parse_override("1:check=true") == (1, "check", True)
    assert parse_override("1:x=a=b") == (1, "x", "a=b")
    for wrong in ("dtype=3", "1:dtype", "x:dtype=3", "1:=3"):
        with pytest.raises(ConfigError, match="RANK:FIELD=VALUE"):
            parse_override(wrong)
