"""Ranks say what they are about to do, over a real store; a difference in any field that counts ends all of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_course import errors
from moe_course.errors import CheckpointError, ConfigError, ExchangeTimeout, MoECourseError, PlanMismatch
from moe_course.guard.handshake import ERROR, MAY_DIFFER, digest, handshake, mismatch
from moe_course.job import prepare, statement
from moe_course.options import RunOptions

JOB = prepare(RunOptions(world_size=2))
FIELDS = [name for name in statement(JOB.options, JOB, None) if name not in MAY_DIFFER]


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    return f"{value} or so"


def meet(statements: list[dict], timeout: float = 10) -> list:
    """Every rank's handshake in a thread of its own; what it returned or raised."""
    store, results = dist.HashStore(), [None] * len(statements)

    def run(rank: int) -> None:
        try:
            results[rank] = handshake(store, rank, len(statements), statements[rank], timeout)
        except MoECourseError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(statements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_that_agree_know_all_statements():
    said = statement(JOB.options, JOB, None)
    results = meet([said, said | {"pid": 7, "host": "elsewhere"}])
    assert results[0] == results[1] and [s["pid"] for s in results[0]] == [said["pid"], 7]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_that_counts_ends_all_ranks_with_both_values(field):
    said = statement(JOB.options, JOB, None)
    odd = other(said[field])
    results = meet([said, said | {field: odd}, said])
    assert {type(result) for result in results} == {PlanMismatch} and len({str(r) for r in results}) == 1
    message = str(results[0])
    shown = "no value" if said[field] is None else str(said[field])[:20]
    assert f"handshake: {field} differs: rank 1 has" in message and "ranks 0, 2 have" in message
    assert str(odd).replace("'", '"')[:20] in message.replace("'", '"') or isinstance(odd, bool | list)
    assert shown.replace("'", '"') in message.replace("'", '"') or isinstance(odd, bool | list)


@pytest.mark.parametrize("field", MAY_DIFFER)
def test_fields_that_may_differ_do_not_count(field):
    said = statement(JOB.options, JOB, None)
    results = meet([said, said | {field: "something else"}])
    assert all(isinstance(result, list) for result in results)


def test_the_fields_cover_plan_shapes_dtypes_and_digests():
    """And nothing is stated twice under another name, or left out of the plan."""
    assert {f"plan.{name}" for name in JOB.plan.as_dict()} <= set(FIELDS)
    assert {"expert_map_digest", "checkpoint_digest", "rows_dtype", "expert_shapes", "tokens_digest"} <= set(FIELDS)
    assert not set(FIELDS) & MAY_DIFFER.keys()
    assert MAY_DIFFER.keys() - {"trace"} <= statement(JOB.options, JOB, None).keys()


def test_the_rank_that_stands_alone_is_named():
    text = mismatch([{"a": 1, "b": 0}, {"a": 2, "b": 1}, {"a": 2, "b": 0}])
    assert text.startswith("a differs: rank 0 has 1, ranks 1, 2 have 2 (so do b)")
    assert mismatch([{"a": 1}, {"a": 2}]).startswith("a differs: rank 1 has 2, rank 0 has 1")
    assert mismatch([{"a": 1}, {}]).startswith("a differs: rank 1 has no value, rank 0 has 1")
    assert mismatch([{"a": 1}, {}]).endswith("; start all ranks with the same flags, files and versions")


def test_hosts_of_several_sizes_are_told_what_helps():
    text = mismatch([{"plan.nodes": [2, 1]}, {"plan.nodes": [2, 1]}, {"plan.nodes": [1, 1, 1]}])
    assert text.startswith("plan.nodes differs: rank 2 has [1, 1, 1], ") and text.endswith(
        "--ranks-per-node, as in 2,2,1"
    )


def test_a_rank_that_cannot_go_on_ends_all_with_its_error():
    """Differing options come first: they may be why it cannot."""
    said = statement(JOB.options, JOB, None)
    broken = statement(JOB.options, None, CheckpointError("model.safetensors is truncated"))
    results = meet([said, broken])
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert str(results[0]) == "rank 1: model.safetensors is truncated" and "truncated" in str(results[1])
    results = meet([said, broken | {"dtype": "float64"}])
    assert [type(result) for result in results] == [PlanMismatch] * 2 and "dtype differs" in str(results[0])


def test_errors_keep_their_kind():
    assert getattr(errors, "CapacityExceeded").exit_code == 4  # noqa: B009, found by name as the handshake does
    said = {ERROR: ["NoSuchError", "what"], "a": 1}
    assert [type(result) for result in meet([said, {"a": 1}])] == [MoECourseError] * 2


def test_ranks_that_never_come_are_named():
    store = dist.HashStore()
    store.set("statement/2", "{}")
    with pytest.raises(ExchangeTimeout, match=r"after 0\.3 s ranks 1, 3 of 4 did not arrive"):
        handshake(store, 0, 4, {}, 0.3)


def test_digests_see_order_and_content():
    assert digest([1, 2]) == digest([1, 2]) != digest([2, 1])
    assert digest(["a", "b"]) != digest(["ab"])


def test_a_checkpoint_of_other_shapes_or_sizes_has_another_digest(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    from moe_course.options import TINY

    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    tensors = load_file(TINY / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    same = prepare(RunOptions(world_size=2, model=model))
    assert statement(same.options, same, None)["checkpoint_digest"] == _digest(JOB)
    save_file(tensors | {name: tensors[name].half()}, model / "model.safetensors", metadata={"format": "pt"})
    assert statement(same.options, same, None)["checkpoint_digest"] != _digest(JOB)
    save_file({n: t * 2 for n, t in tensors.items()}, model / "model.safetensors", metadata={"format": "pt"})
    assert statement(same.options, same, None)["checkpoint_digest"] != _digest(JOB)  # other weights, same shapes


def test_a_config_that_differs_outside_the_sparse_layers_is_noticed(tmp_path):
    """The attention and the norms read it, too."""
    import shutil

    from moe_course.options import TINY

    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    job = prepare(RunOptions(world_size=2, model=model))
    ours, theirs = statement(job.options, job, None), statement(JOB.options, JOB, None)
    assert [name for name in ours if ours[name] != theirs[name]] == ["config_digest"]


def _digest(job):
    return statement(job.options, job, None)["checkpoint_digest"]


def test_fields_that_change_what_is_computed_are_all_stated():
    """Written out: a field that is left out, or allowed to differ, has to be taken out here as well."""
    assert {
        "moe_course", "torch", "transformers", "world_size", "tensor_parallel_size", "data_parallel_size",
        "prefill_context_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "sequence_parallel_moe",
        "all2all_backend", "expert_placement_strategy", "device", "transport", "dtype", "temperature", "seed",
        "max_new_tokens", "stop_at_eos", "check", "trace_values", "guard", "prompts", "config_digest",
        "config.hidden_size", "config.n_routed_experts", "config.num_experts_per_tok", "plan.placement",
        "plan.dispatch_group", "plan.reduce_group", "plan.split_group", "plan.ep_size", "plan.moe_tp_size",
    } <= set(FIELDS)  # fmt: skip


@pytest.mark.parametrize(
    ("override", "says"),
    [("1:max_new_tokens=abc", "max_new_tokens is 'abc'"), ("1:check=3", "check is 3"), ("1:seed=true", "seed is True")],
)
def test_overrides_of_the_wrong_kind_are_refused(override, says):
    with pytest.raises(ConfigError, match=says):
        RunOptions(world_size=2, overrides=(override,)).on_rank(1)


def test_overrides_of_folders_become_paths():
    mine, _ = RunOptions(world_size=2, overrides=('1:trace="/tmp"', "1:json_file=null")).on_rank(1)
    assert mine.trace == Path("/tmp") and mine.json_file is None


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(),
        RunOptions(prompts=("a\nb", ""), seed=0, check=True, guard=False, trace=Path("t"), timeout=3.0),
        RunOptions(tensor_parallel_size=2, enable_expert_parallel=False, sequence_parallel_moe=False, warn_after=1.0),
        RunOptions(faults=("kill@rank=1", "stop@rank=0"), overrides=("1:seed=3",), stop_at_eos=True, temperature=0.5),
    ],
)
def test_options_survive_the_way_to_the_ranks(options, monkeypatch):
    """What the launcher was told is what a rank reads from its arguments."""
    from moe_course import cli, run

    seen = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "rank_main", lambda found: seen.append(found) or 0)
    assert cli.main(["run", *options.as_arguments()]) == 0
    assert seen == [options]


def test_overrides_change_what_a_rank_does_or_what_it_says():
    options = RunOptions(world_size=2, overrides=("1:dtype=bfloat16", '1:host="x"', "0:seed=3"))
    mine, said = options.on_rank(1)
    assert mine.dtype == "bfloat16" and mine.seed == 0 and said == {"host": "x"}
    mine, said = options.on_rank(0)
    assert mine == replace(options, seed=3) and said == {}
