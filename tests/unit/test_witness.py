"""Own stages next to the package's: silent about right ones on every backend, and every wrong one is named."""

from __future__ import annotations

import pytest
import torch
from layer_cases import make_config, make_weights
from own_stage_texts import ALL, COMBINED, COMPUTED, GATHERED, MAPPED, ROUTED

from moe_course.backends import BACKENDS
from moe_course.backends.configure import configure
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.errors import ConfigError, ExchangeMismatch, MoECourseError, StageFailed, VerificationFailed
from moe_course.expert_map import make_placement
from moe_course.guard.blame import naming
from moe_course.guard.canary import canary
from moe_course.guard.witness import Witness
from moe_course.layer import MoELayer
from moe_course.options import TINY, RunOptions
from moe_course.own_stages import load_own_stages, stages_for
from moe_course.parallel import make_plan
from moe_course.stages import Stages

RANKS, EXPERTS = 2, 6
SHAPES = [name for name in BACKENDS if name != "no_dp_ep"]


def run(folder, files: dict[str, str], backend: str = "allgather_reducescatter", steps=(0, 1), ranks=RANKS, **compare):
    """Known pass, then passes over real rows; each rank's outputs and what its ledger counted in them."""
    own = None
    if files:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        own = load_own_stages(folder)
    config = make_config(EXPERTS, 2, 16, 24)
    weights, placement = make_weights(config, torch.float32), make_placement(ranks, EXPERTS)

    def on_rank(comm):
        shape, stages = configure(backend), Stages()
        compare_in = {"known_pass": True, "real_passes": True} | compare
        if own is not None:
            stages = Witness(own, comm, backend, shape, Stages(), torch.device("cpu"), **compare_in).stages()
        layer = MoELayer(
            config, placement, comm, shape, gate_weight=weights.gate, bias=weights.bias, shared=weights.shared,
            stages=stages, layer=4, **weights.of(placement, comm.rank),
        )  # fmt: skip
        canary(layer)
        comm.ledger = Ledger()
        generator = torch.Generator().manual_seed(comm.rank)
        outputs = []
        for step in steps:
            comm.step = step
            rows = torch.randn(3 * comm.rank + step, 16, generator=generator)  # rank 0 begins without rows
            outputs.append(layer.forward(rows))
        return outputs, [
            row for row in comm.ledger.as_rows() if row["op"] != "window"
        ]  # opened once, by the first user

    return run_threads(ranks, on_rank, timeout=20)


@pytest.mark.parametrize("backend", SHAPES)
def test_right_stages_are_not_disturbed_on_any_backend(tmp_path, backend):
    """Same rows, same bill, and the package's own functions count as yours."""
    theirs = {
        name: f"from moe_course.backends.{backend} import {name} as theirs\n\n\n"
        f"def {name}(*args, **keywords):\n    return theirs(*args, **keywords)\n"
        for name in ("dispatch", "combine")
    }
    plain = run(tmp_path / "no", {}, backend)
    for files in (theirs, {"dispatch": theirs["dispatch"]}, {"combine": theirs["combine"]}):
        found = run(tmp_path / "-".join(files), files, backend)
        for (outputs, bill), (expected, expected_bill) in zip(found, plain, strict=True):
            assert all(map(torch.equal, outputs, expected)) and bill == expected_bill


def test_right_stages_written_another_way_pass(tmp_path):
    for (outputs, _), (expected, _) in zip(run(tmp_path / "my", ALL), run(tmp_path / "no", {}), strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, expected, strict=True))


def test_a_handle_of_your_own_is_between_your_dispatch_and_your_combine(tmp_path):
    own = {
        "dispatch": GATHERED.replace("tuple(gathered.counts)", "{'counts': gathered.counts}"),
        "combine": COMBINED.replace("dispatched.handle", "dispatched.handle['counts']"),
    }
    for (outputs, _), (expected, _) in zip(run(tmp_path / "my", own), run(tmp_path / "no", {}), strict=True):
        assert all(map(torch.equal, outputs, expected))
    with pytest.raises(VerificationFailed, match="handle is a dict, expected a list"):
        run(tmp_path / "half", {"dispatch": own["dispatch"]})


FACTOR = ("= gathered.rows,", "= gathered.rows * {},")
WRONG = {
    "foreign ids": ("dispatch", GATHERED, "here & ", "", "the known pass before generation: topk_ids["),
    "local ids": ("dispatch", GATHERED, "ids, -1)", "placement.local[ids.long()].int(), -1)", "topk_ids["),
    "a row lost": ("dispatch", GATHERED, "gathered.rows,", "gathered.rows[:-1],", "hidden_states is ["),
    "rows upside down": ("dispatch", GATHERED, "gathered.rows,", "gathered.rows.flip(0),", "hidden_states["),
    "weights of one": ("dispatch", GATHERED, "ids, weights,", "ids, weights * 0 + 1,", "topk_weights["),
    "handle": ("dispatch", GATHERED, "tuple(gathered.counts)", "gathered.counts[::-1]", "handle[0] is "),
    "no handle": ("dispatch", GATHERED, "tuple(gathered.counts)", "None", "handle is None, expected a list"),
    "layout": ("dispatch", GATHERED, '"rows"', '"routes"', "layout is 'routes', expected 'rows'"),
    "a tuple": ("dispatch", GATHERED, "return Dispatched(", "return (", "it returned a tuple, expected a Dispatched"),
    "in place": ("dispatch", GATHERED, "    here", "    hidden_states += 1\n    here", "changes its input hid"),
    "on rank 1": ("dispatch", GATHERED, FACTOR[0], FACTOR[1].format("(1 + comm.rank)"), "rank 1: your dispatch"),
    "later": ("dispatch", GATHERED, FACTOR[0], FACTOR[1].format("(1 + (comm.step == 1))"), "step 1: hidden_states["),
    "not added": ("combine", COMBINED, "sum(parts[1:], parts[0].clone())", "parts[0]", "its result["),
    "order lost": ("combine", COMBINED, "parts[0].clone())", "parts[0].clone()).flip(0)", "its result["),
    "not weighted": ("experts", COMPUTED, "dispatched.topk_weights[row, k] *", "", "its result["),
    "rows wiped": ("experts", COMPUTED, "return", "dispatched.hidden_states.zero_()\n    return", "input dispatched."),
    "halves swapped": ("experts", COMPUTED, "F.silu(gate) * up", "F.silu(up) * gate", "its result["),
    "bias weighs": ("route", ROUTED, "scores.gather", "(scores + bias).gather", "step 0: topk_weights (in the order"),
    "no bias": ("route", ROUTED, "(scores + bias)", "scores", "topk_ids (each row sorted)["),
    "int64": ("route", ROUTED, "ids.int()", "ids", "topk_ids is [0, 2] int64, expected [0, 2] int32"),
    "one too low": ("expert_map", MAPPED, "= torch.arange(", "= 1 + torch.arange(", "for EP rank 0 of 2"),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_stage_is_named_with_its_file(tmp_path, which):
    name, right, old, new, says = WRONG[which]
    assert old in right
    with pytest.raises(VerificationFailed) as caught:
        run(tmp_path / "my", {name: right.replace(old, new)})
    message = str(caught.value)
    assert f"your {name} ({tmp_path / 'my' / name}.py) differs from the package's" in message and says in message
    assert message.endswith("repair it, or move the file away to run the package's")


ODD_ROUTING = {
    "two swapped": ("ids.int()", "ids.int()\n\n\ninner = route\n\n\ndef route(*given):\n    return inner(*given)[::-1]",
                    "topk_ids are torch.float32"),
    "lists": ("ids.int()", "ids.tolist()", "it returned a tuple, expected topk_weights and topk_ids"),
    "one tensor": (", ids.int()", "", r"it returned \[\d, 2\] float32, expected topk_weights and topk_ids"),
    "rows lost": ("ids.int()", "ids[1:].int()", r"topk_ids \[\d, 2\]"),
}  # fmt: skip


@pytest.mark.parametrize("which", ODD_ROUTING)
def test_what_no_dispatch_could_take_is_named_where_nothing_is_compared(tmp_path, which):
    """Without --check the known pass is the only one that is compared, and no router runs in it."""
    old, new, says = ODD_ROUTING[which]
    assert old in ROUTED
    with pytest.raises(VerificationFailed, match=rf"your route \(.*route\.py\) gave what .* in layer 4: .*{says}"):
        run(tmp_path / "my", {"route": ROUTED.replace(old, new)}, steps=(1,), real_passes=False)


def test_rows_in_shared_memory_are_compared_with_what_lay_there_before(tmp_path):
    """Both dispatches write to one window; the package's rows must not turn into yours."""
    text = "from moe_course.backends.one_sided import dispatch as theirs\n\n\ndef dispatch(rows, *args, **keywords):\n"
    with pytest.raises(VerificationFailed, match=r"your dispatch .* hidden_states\["):
        twice = "    theirs(2 * rows, *args, **keywords)\n    return theirs(2 * rows, *args, **keywords)\n"
        run(tmp_path / "my", {"dispatch": text + twice}, "one_sided")


def test_the_backend_is_named_when_a_dispatch_was_written_for_another(tmp_path):
    with pytest.raises(VerificationFailed, match=r"your dispatch \(.*\(backend high_throughput\)"):
        run(tmp_path / "my", {"dispatch": GATHERED}, "high_throughput")
    with pytest.raises(
        VerificationFailed, match=r"if it was written for allgather_reducescatter, .* leave out --all2all"
    ):
        run(tmp_path / "my", {"dispatch": GATHERED}, "high_throughput")


def test_an_error_keeps_the_line_and_one_of_the_package_its_kind(tmp_path):
    broken = GATHERED.replace("    weights, ids = gathered.metadata\n", "    raise ValueError('no idea')\n")
    with pytest.raises(StageFailed, match=r"your dispatch \(.*dispatch\.py, line 7\) raised ValueError: no idea; rep"):
        run(tmp_path / "a", {"dispatch": broken})
    mute = GATHERED.replace("    weights, ids = gathered.metadata\n", "    assert len(topk_ids) > 99\n")
    with pytest.raises(StageFailed, match=r", line 7\) raised AssertionError \(`assert len\(topk_ids\) > 99`\); rep"):
        run(tmp_path / "mute", {"dispatch": mute})
    odd = GATHERED.replace("    gathered =", "    if comm.rank:\n        comm.barrier()\n    gathered =", 1)
    with pytest.raises(ExchangeMismatch) as caught:
        run(tmp_path / "b", {"dispatch": odd})
    says = f"your dispatch ({tmp_path / 'b' / 'dispatch.py'}, line 8) does not make the same exchanges on all ranks: "
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [("SystemExit(3)", r"SystemExit: it ends the program \(sys\.exit\(3"), ("KeyboardInterrupt", "Keyb")],
)
def test_a_stage_that_ends_the_program_is_named(tmp_path, what, words):
    leaves = GATHERED.replace("    gathered", f"    if comm.rank == 1:\n        raise {what}\n    gathered", 1)
    with pytest.raises(StageFailed, match=rf"dispatch\.py, line 7\) raised {words}"):
        run(tmp_path / "my", {"dispatch": leaves})


#: A rank without rows does not take part: others wait in this exchange, it goes on to the next one.
IDLE_LEAVES = """\
    if len(hidden_states) == 0:
        return Dispatched(hidden_states, None, topk_ids, topk_weights, None, "rows", [0] * comm.world_size)
    gathered"""


@pytest.mark.parametrize("known", [True, False])
def test_a_dispatch_that_leaves_out_an_exchange_is_named_on_every_rank(tmp_path, known):
    file = tmp_path / "my" / "dispatch.py"
    with pytest.raises(MoECourseError) as caught:
        run(tmp_path / "my", {"dispatch": GATHERED.replace("    gathered", IDLE_LEAVES, 1)}, known_pass=known)
    assert f"your dispatch ({file}" in str(caught.value)
    seen = caught.value.__cause__
    assert f"your dispatch ({file}" in str(seen) and isinstance(caught.value, ExchangeMismatch)


def test_a_mismatch_elsewhere_names_your_stages_too_and_keeps_its_notes(tmp_path):
    folder = tmp_path / "my"
    folder.mkdir()
    (folder / "dispatch.py").write_text(GATHERED)
    error = ExchangeMismatch("rows differ")
    error.add_note("who waits")
    says = "rows differ; stages of yours that exchange rows: dispatch"
    with pytest.raises(ExchangeMismatch, match=says) as caught, naming(load_own_stages(folder)):
        raise error
    assert caught.value.__notes__ == ["who waits"]
    with pytest.raises(ExchangeMismatch) as caught, naming(None):
        raise error
    assert caught.value is error


def test_a_map_written_out_and_experts_without_a_map(tmp_path):
    """With every expert on one rank the package's map is None."""
    run(tmp_path / "a", {"expert_map": MAPPED}, ranks=1)
    with pytest.raises(StageFailed, match=r"your experts .* TypeError: .*expert_map is None here: every expert is on"):
        run(tmp_path / "b", {"experts": COMPUTED}, ranks=1)


def test_half_of_a_pair_is_refused_where_no_rows_travel(tmp_path):
    folder = tmp_path / "my"
    folder.mkdir()
    (folder / "dispatch.py").write_text(GATHERED)
    config = MoEConfig.from_pretrained(TINY)
    shared = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for options, sizes in (({"world_size": 1}, "TP 1, DP 1"), (shared, "TP 2, DP 1")):
        options = RunOptions(stages=folder, **options)
        with pytest.raises(
            ConfigError, match=rf"no rows travel in this plan \({sizes}, PCP 1\), and --stages brings its"
        ):
            stages_for(options, make_plan(options.parallel(), config))
    travelling = RunOptions(stages=folder, world_size=2)
    assert stages_for(travelling, make_plan(travelling.parallel(), config)).files
    (folder / "combine.py").write_text(COMBINED)
    alone = RunOptions(stages=folder, world_size=1)
    assert stages_for(alone, make_plan(alone.parallel(), config)).files
    run(folder, {"dispatch": GATHERED, "combine": COMBINED}, "no_dp_ep", ranks=1)


def test_nothing_is_compared_where_nobody_asked(tmp_path):
    doubled = ROUTED.replace("weights / weights", "2 * weights / weights")
    run(tmp_path / "my", {"route": doubled}, real_passes=False)
    run(tmp_path / "my", {"route": doubled}, steps=(2, 3))


def test_what_only_the_package_does_is_refused(tmp_path):
    folder = tmp_path / "my"
    folder.mkdir()
    for flag, name, options in (
        ("--static-shapes", "experts", {"static_shapes": True}),
        ("--dispatch-quant fp8_group", "dispatch", {"dispatch_quant": "fp8_group"}),
        ("--combine-dtype bfloat16", "combine", {"combine_dtype": "bfloat16"}),
        ("--reduce-in-node", "combine", {"reduce_in_node": True}),
    ):
        file = folder / f"{name}.py"
        file.write_text(f"def {name}(): pass\n")
        with pytest.raises(ConfigError, match=f"{flag} is done by the package's {name}, and --stages brings its own"):
            stages_for(RunOptions(stages=folder, **options))
        assert stages_for(RunOptions(stages=folder)).files == {name: file}
        file.unlink()
    with pytest.raises(ConfigError, match=r"my has no stage in it; a stage is a file of one of the names route, exp"):
        stages_for(RunOptions(stages=folder))
    with pytest.raises(ConfigError, match=r"elsewhere does not exist"):
        stages_for(RunOptions(stages=tmp_path / "elsewhere"))
    assert stages_for(RunOptions()) is None
