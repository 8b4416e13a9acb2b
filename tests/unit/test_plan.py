"""`moe-course plan`: its JSON against the tables, what it refuses and how."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_course.backends.select import AVAILABLE
from moe_course.cli import main
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.options import TINY
from moe_course.parallel import make_plan
from moe_course.planner.document import dumps, plan_json

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "parallel.json").read_text())
SMALL = MoEConfig(16, 24, 12, 3, ("dense", "sparse", "sparse", "dense", "sparse"), n_shared_experts=1)


@pytest.fixture
def call(capsys):
    """Run the command; returns exit code, stdout, stderr."""

    def run(*args):
        code = main(["plan", *map(str, args)])
        return code, *capsys.readouterr()

    return run


def sizes_as_flags(sizes: dict[str, int]) -> list[str]:
    return [part for name, size in sizes.items() for part in (f"-{name}", str(size))]


# -- decision table --------------------------------------------------------------------------------------------------


def check_decision(row: dict, flag: str, sequence_parallel: bool, found: dict) -> None:
    """Raise AssertionError unless the JSON has the row of vLLM's table, and the rest of the plan agrees with it."""
    decision = found["decision"]
    moe_tp, ep, use_ep = row[flag]
    on = flag == "on"
    travels = on and bool(row["all2all_sp"] if sequence_parallel else row["all2all"])
    assert [decision[axis] for axis in ("tp", "dp", "pcp")] == [row["tp"], row["dp"], row["pcp"]]
    assert decision["sequence_parallel"] == found["sequence_parallel"] == sequence_parallel
    assert (decision["moe_tp_size"], decision["ep_size"], decision["use_ep"]) == (moe_tp, ep, use_ep)
    assert (found["moe_tp_size"], found["ep_size"], found["use_ep"]) == (moe_tp, ep, use_ep)
    assert decision["use_all2all_kernels"] == found["use_all2all"] == travels, "all2all of the layers"
    manager = row["dp"] > 1 or sequence_parallel or (on and row["pcp"] > 1)
    assert decision["use_all2all_manager"] == manager, "all2all of the EP group"


def decision_cases():
    """Every row of the table, with the flag off and on, and on once more without sequence parallel where it applies."""
    for row in TABLES["moe_parallel"]:
        applies = row["all2all_sp"] is not None
        yield row, "off", False, []
        yield row, "on", applies, []
        if applies:
            yield row, "on", False, ["--no-sequence-parallel-moe"]


SEEN: dict[tuple[str, ...], dict] = {}  # the same command says the same


def decision_json(call, row, flag, more):
    flags = ["--enable-expert-parallel"] if flag == "on" else []
    args = (*sizes_as_flags({axis: row[axis] for axis in ("tp", "dp", "pcp")}), *flags, *more, "--json=-")
    if args not in SEEN:
        code, out, _ = call(*args)
        SEEN[args] = json.loads(out)
        assert (code == 2) == bool(SEEN[args]["refused"])
    return SEEN[args]


@pytest.mark.parametrize(("row", "flag", "sp", "more"), list(decision_cases()))
def test_the_json_has_the_row_of_the_decision_table(call, row, flag, sp, more):
    """Also for sizes that are refused: more than one of DP and PCP, or I not divisible without EP."""
    check_decision(row, flag, sp, decision_json(call, row, flag, more))


@pytest.mark.parametrize(
    "wrong",
    [
        {"use_all2all_kernels": True},  # TP + EP would dispatch
        {"use_all2all_manager": False},
        {"ep_size": 2},  # EP as TP alone
        {"moe_tp_size": 1},  # experts cut over TP and not over DP
    ],
    ids=str,
)
def test_wrong_decisions_are_caught(call, wrong):
    caught = 0
    for row, flag, sp, more in decision_cases():
        found = decision_json(call, row, flag, more)
        try:
            check_decision(row, flag, sp, found | {"decision": found["decision"] | wrong})
        except AssertionError:
            caught += 1
    assert caught > 1


@pytest.mark.parametrize("table", TABLES["groups"], ids=lambda table: f"{table['world_size']}-{table['sizes']}")
def test_groups_of_the_json_equal_the_tables(call, table):
    copies = table["world_size"]
    for size in table["sizes"].values():
        copies //= size
    flags = [*sizes_as_flags(table["sizes"]), "--external-data-parallel-size", copies]
    found = json.loads(call(*flags, "--enable-expert-parallel", "--json=-")[1])
    assert found["world_size"] == table["world_size"] == len(found["ranks"])
    for kind in ("tp", "pcp", "pp", "dp", "ep"):
        assert sorted(found["groups"][kind]) == sorted(table[kind])
        for rank, row in enumerate(found["ranks"]):
            assert row["rank"] == rank and rank in row["groups"][kind] and row["groups"][kind] in table[kind]
            assert kind != "ep" or row["groups"]["ep"][row["ep_rank"]] == rank


# -- who owns what ---------------------------------------------------------------------------------------------------


def check_ownership(found: dict) -> None:
    """Raise AssertionError unless each copy and stage has every expert, and each copy every layer, the right times."""
    flat = found["dp"] * found["pcp"] * found["tp"]
    experts, layers = Counter(), Counter()
    for row in found["ranks"]:
        experts.update((row["external_dp"], row["pp"], expert) for expert in row["experts"])
        layers.update((row["external_dp"], row["dp"], row["pcp"], row["tp"], layer) for layer in row["layers"])
    copies, stages = range(found["external_dp"]), range(found["pp"])
    ids = range(found["model"]["n_routed_experts"])
    times = 1 if found["use_ep"] else flat
    assert experts == {(copy, stage, expert): times for copy in copies for stage in stages for expert in ids}
    places = [(c, d, p, t) for c in copies for d in range(found["dp"]) for p in range(found["pcp"])
              for t in range(found["tp"])]  # fmt: skip
    assert layers == {(*place, layer): 1 for place in places for layer in found["model"]["sparse_layers"]}


parallel = st.builds(
    ParallelConfig,
    tensor_parallel_size=st.integers(1, 3),
    data_parallel_size=st.integers(1, 3),
    prefill_context_parallel_size=st.integers(1, 2),
    pipeline_parallel_size=st.integers(1, 6),
    external_data_parallel_size=st.integers(1, 2),
    enable_expert_parallel=st.booleans(),
    expert_placement_strategy=st.sampled_from(["linear", "round_robin"]),
    all2all_backend=st.sampled_from(AVAILABLE),
)


def small_plan(flags: ParallelConfig, experts: int = 20, n_group: int = 1) -> dict:
    config = MoEConfig(16, 24, experts, 3, SMALL.mlp_layer_types, n_shared_experts=1, n_group=n_group)
    return plan_json(make_plan(flags, config, strict=False))


@settings(max_examples=80, deadline=None)
@given(parallel, st.sampled_from([(18, 1), (19, 1), (20, 4), (40, 4)]))
def test_every_expert_and_layer_is_owned(flags, model):
    found = small_plan(flags, *model)
    check_ownership(found)
    assert json.loads(dumps(found)) == found  # JSON, and nothing lost in it


@pytest.mark.parametrize("fault", ["twice", "nowhere", "other stage", "layer twice"])
def test_wrong_ownership_is_caught(fault):
    found = small_plan(ParallelConfig(data_parallel_size=2, pipeline_parallel_size=2))
    check_ownership(found)
    first, second = found["ranks"][:2]  # stages 0 and 1
    if fault == "twice":
        first["experts"] = [*first["experts"], 19]
    elif fault == "nowhere":
        first["experts"] = first["experts"][1:]
    elif fault == "other stage":
        first["pp"] = 1
    else:
        second["layers"] = [1, *second["layers"]]
    with pytest.raises(AssertionError):
        check_ownership(found)


# -- errors and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--world-size", "0"], "--world-size is 0, needs to be at least 1"),
        (["--world-size", "6", "-tp", "4"], "--world-size 6 is not a multiple of --tensor-parallel-size 4"),
        (["--world-size", "257"], "256 experts cannot be spread over 257 EP ranks; use at most 256 ranks"),
        (["-dp", "2", "--all2all-backend", "teleport"], "'teleport' is not known, choose from: allgather"),
        (["-tp", "2", "--sequence-parallel-moe"], "here expert parallelism is off, the sizes are 2 and 1"),
        (["--world-size", "4", "--rank", "4"], "--rank 4 is not in a world of 4; ranks begin with 0"),
        (["--rank", "-1"], "--rank -1 is not in a world of 4"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0, needs to be at least 1"),
        (["--model", "glm-6"], "--model glm-6: no such folder or file; known names: tiny, glm-5.1"),
        (["-dp", "100000000"], "100000000 ranks are too many to list, the most is 65536; plan fewer"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_an_error_and_nothing_else(call, tmp_path, args, says):
    code, out, err = call(*args, "--json", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written == {"schema": "moe_course.plan/1", "error": err.removeprefix("error: ").rstrip("\n")}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-dp", "2", "-pcp", "2"], "data_parallel_size 2 with prefill_context_parallel_size 2: use one of them"),
        (["-tp", "3"], "moe_intermediate_size 32 cannot be cut into 3 equal parts; add --enable-expert-parallel"),
        (["-dp", "2", "--enable-expert-parallel", "--all2all-backend", "deepep_high_throughput", "--transport",
          "vendor"], "needs the package deep_ep, which is not installed here"),
        (["-dp", "2", "--enable-expert-parallel", "--all2all-backend", "flashinfer_nvlink_one_sided", "--transport",
          "gloo"], "gloo has none that ranks share; use --transport shm"),
    ],
)  # fmt: skip
def test_a_refused_plan_is_shown_and_then_refused(call, tmp_path, args, says):
    code, out, err = call(*args, "--explain", "--json", tmp_path / "plan.json")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert "refused" in out and "1. layout" in " ".join(out.split())
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["refused"] == [err.removeprefix("error: ").rstrip("\n")] and written["ranks"]


def test_json_goes_to_stdout_alone_and_is_stable(call, tmp_path):
    code, out, err = call("--world-size", 3, "--explain", "--json", "-")
    assert (code, err) == (0, "") and json.loads(out)["schema"] == "moe_course.plan/1"
    assert call("--world-size", 3, "--json", tmp_path / "plan.json")[0] == 0
    assert (tmp_path / "plan.json").read_text() == out
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]  # no temporary file stays


def test_a_file_that_cannot_be_written_is_named(call, tmp_path):
    code, _, err = call("--json", tmp_path / "no" / "plan.json")
    assert code == 2 and f"--json {tmp_path / 'no' / 'plan.json'} cannot be written" in err


def test_one_rank_of_the_json(call):
    every, one = (json.loads(call("-tp", 2, "-dp", 2, *more, "--json=-")[1]) for more in ([], ["--rank", 2]))
    assert one["ranks"] == [every["ranks"][2]] and one["groups"] == every["groups"]
    assert one["ranks"][0]["memory"]["weights"] > 0


def test_models_are_named_or_read_from_a_folder_or_file(call, tmp_path):
    """GLM-5.1 by name is the config in the package; a folder needs no weights."""
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    known = [json.loads(call("--model", name, "--json=-")[1]) for name in ("tiny", tmp_path, tmp_path / "config.json")]
    assert [found["model"].pop("name") for found in known] == ["tiny", str(tmp_path), str(tmp_path / "config.json")]
    assert known[0] == known[1] == known[2]
    glm = json.loads(call("--model", "GLM-5.1", "--world-size", 8, "--json=-")[1])
    assert glm["model"]["bytes"]["routed"] == 75 * 256 * 72 * 2**20 and len(glm["ranks"][0]["layers"]) == 75
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in call("--model", tmp_path)[2]


def test_a_quantised_checkpoint_is_said_to_be_counted_in_another_dtype(call, tmp_path):
    config = json.loads((TINY / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "quantised (fp8); sizes here are for bfloat16" in " ".join(call("--model", tmp_path)[1].split())


def test_mistakes_cost_no_torch_and_plans_no_transformers():
    """A mistake in the flags must not wait for torch."""
    code = (
        "import sys; from moe_course.cli import main\n"
        "assert main(['plan', '-tp', '0', '--json', '-']) == 2 and 'torch' not in sys.modules\n"
        "assert main(['plan', '--world-size', '6', '-tp', '4']) == 2 and 'torch' not in sys.modules\n"
        "assert main(['plan', '--explain']) == 0 and 'transformers' not in sys.modules\n"
        "assert 'torch.distributed.run' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
