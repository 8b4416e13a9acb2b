"""Every kind of damage to a rank's file is refused by name: which file, which column, both values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trace_cases import both, change_folder, put

from moe_course.errors import TraceError
from moe_course.trace import Trace
from moe_course.trace.record import Recorder
from moe_course.trace.schema import COLUMNS
from moe_course.trace.trace import write_rank

NAN = float("nan")


@pytest.fixture
def write(tmp_path):
    """Write a correct folder with rank 1's tensors and the meta changed; returns the folder."""
    return lambda *change, **more: change_folder(tmp_path, *change, **more)


def replace_by(name: str, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


DAMAGE = {
    "missing column": (lambda t: t.pop("via_rank"), "column via_rank is missing; it has contribution, expert, "),
    "missing span": (lambda t: t.pop("span_stage"), "column span_stage is missing"),
    "missing output": (lambda t: t.pop("output"), "column output is missing"),
    "unknown column": (lambda t: t.update(extra=torch.zeros(4)), "column extra is not known; known: contribution, "),
    "wrong dtype": (replace_by("expert", torch.Tensor.int), "column expert is torch.int32, expected torch.int64"),
    "wrong weight dtype": (replace_by("weight", torch.Tensor.double), "column weight is torch.float64, expected torch"),
    "wrong shape": (replace_by("row", lambda t: t.view(3, 2)), r"column row has shape \[3, 2\], expected \['n'\]"),
    "wrong width": (replace_by("output", lambda t: t[:, :8].contiguous()), r"\[3, 8\], expected \['n', 16\]"),
    "length": (replace_by("k", lambda t: t[:3].clone()), "column k has 3 entries, expected 6"),
    "span length": (replace_by("span_step", lambda t: t[:1].clone()), "column span_layer has 8 entries, expected 1"),
    "a route was lost": (lambda t: t.update({n: t[n][:3].clone() for n in (*COLUMNS, "contribution")}),
                         "column step has 3 entries, expected 6"),
    "expert out of range": (put("expert", 2, 6), "column expert, entry 2, is 6, expected 0 to 5"),
    "expert of -1": (put("expert", 2, -1), "column expert, entry 2, is -1, expected 0 to 5"),
    "k out of range": (put("k", 1, 2), "column k, entry 1, is 2, expected 0 to 1"),
    "another rank's rows": (put("source_rank", 0, 0), "column source_rank, entry 0, is 0, expected 1 to 1"),
    "owner contradicts the plan": (put("owner_rank", 1, 0),
                                   r"column owner_rank, entry 1, is 0 for expert 5; the plan \(linear, 2 EP .* says 1"),
    "local id contradicts the plan": (put("local_expert", 3, 0),
                                      "column local_expert, entry 3, is 0 for expert 2; the plan .* says 2"),
    "NaN weight": (put("weight", 1, NAN), "column weight, entry 1, holds nan, expected finite numbers"),
    "NaN contribution": (put("contribution", (2, 7), NAN), "column contribution, entry 2, holds nan"),
    "infinite output": (put("output", (1, 0), float("inf")), "column output, entry 1, holds inf, expected finite"),
    "a route twice": (put("k", 1, 0), "column k has 2 entries of 0 for row 0 of step 0, layer 1, expected 1"),
    "prompt that was not given": (put("prompt", 0, 2), "column prompt, entry 0, is 2, expected 0 to 1"),
    "position behind the text": (put("position", 0, 4), "column position, entry 0, is 4, expected 0 to 3"),
    "another token": (put("token_id", 2, 7), "column token_id, entry 2, is 7; position 1 of prompt 1 is token 1"),
    "a step behind the last": (put("step", 5, 2), "columns step and layer, entry 5, are 2 and 1: the rank has no span"),
    "a row too many": (put("row", 2, 2), "column row, entry 2, is 2, expected less than 2: rank 1 brings 2 rows of th"),
    "a place nobody said": (put("receive_row", 1, -1), "column receive_row, entry 1, is -1, expected 0 or more: val"),
    "no place to leave from": (put("send_row", 3, -1), "column send_row, entry 3, is -1, expected 0 or more"),
    "stage": (put("span_stage", 1, 5), "column span_stage, entry 1, is 5, expected 0 to 4"),
    "time runs backwards": (put("span_begin_ns", 1, 4), "column span_begin_ns, entry 1, is 4: before the span ahead"),
    "a pass left out": (put("span_step", 1, 2), "column span_step, entry 1, is 2, expected 0 or 1: passes come one"),
    "first pass left out": (put("span_step", slice(0, 8), 1), "column span_step, entry 0, is 1, expected 0$"),
    "a layer that was not entered": (put("layer", 3, 9), "entry 3, are 0 and 9: the rank has no span there; it"),
    "a pass that was not made": (put("step", 3, 7), r"entry 3, are 7 and 1: .* layers \[1\] in 2 passes"),
    "no pass at all": (lambda t: t.update({n: t[n][:0].clone() for n in t if n.startswith("span")}),
                       "entry 0, are 0 and 1: the rank has no span there"),
    "a pass that nobody made": (lambda t: t.update({n: torch.cat([t[n], t[n][-1:] + (n == "span_step")])
                                                    for n in t if n.startswith("span")}),
                                "column span_begin_ns, entry 8|span_step has 9 entries in layers, expected 8: each of"),
    "a layer of its own": (put("span_layer", 6, 7), r"entry 6, are \(1, 7, 2\), expected \(1, 1, 2\): each of 2 passe"),
    "a stage left out": (put("span_stage", 6, 3), r"entry 6, are \(1, 1, 3\), expected \(1, 1, 2\): each of 2 passes"),
    "before the clock": (put("span_begin_ns", 0, -7), "column span_begin_ns, entry 0, is -7, expected 0 or more"),
    "a stage without a layer": (put("span_layer", 0, -1), "column span_layer, entry 0, is -1 in stage 'route', exp"),
    "a row of two tokens": (both(put("position", 3, 0), put("token_id", 3, 0)),
                            r"position, entry 3, are \(1, 0\), expected \(1, 1\): row 1 of rank 1 in step 0"),
    "a token in two rows": (both(put("position", slice(2, 4), 0), put("token_id", slice(2, 4), 0)),
                            r"position, entry 2, are \(1, 0\), expected \(1, 1\): row 1 of rank 1 in step 0"),
    "a token of another rank": (both(put("prompt", slice(0, 2), 0), put("token_id", slice(0, 2), 0)),
                                r"position, entry 0, are \(0, 0\), expected \(1, 0\): row 0 of rank 1 in step 0"),
    "an output twice": (put("output_row", 1, 0), r"output_row, entry 1, are \(0, 1, 0\), expected \(0, 1, 1\)"),
    "an output before the run": (put("output_step", 1, -7), r"entry 1, are \(-7, 1, 1\), expected \(0, 1, 1\)"),
    "an output left out": (lambda t: t.update({n: t[n][1:].clone() for n in t if n.startswith("output")}),
                           "column output has 2 entries, expected 3: one for each row"),
    "two routes in a place": (put("receive_row", slice(0, 6), 0), "column receive_row, entry 0, is 0, expected 2: whe"),
    "a place far away": (put("receive_row", 2, 2**39), "column receive_row, entry 2, is 549755813888, expected 3: whe"),
    "a place to leave from": (put("send_row", 3, 5), "column send_row, entry 3, is 5, expected 1: where all_to_all pu"),
    "a forwarder": (put("via_rank", 3, 1), "column via_rank, entry 3, is 1, expected -1: where all_to_all puts the"),
    "ends before it begins": (put("span_end_ns", 1, 4), "entry 1, is 5: .* after its own end 4"),
}  # fmt: skip


def test_what_is_whole_is_read(write):
    trace = Trace.load(write())
    assert len(trace) == 12 and len(trace.ranks) == 2
    assert trace.spans(1)["span_end_ns"].tolist() == [4 * n + 5 for n in range(8)]
    assert trace.values(0)["contribution"].shape == (6, 16)
    assert len(Trace.load(write(values=False))) == 12
    with pytest.raises(TraceError, match="no column 'owner'; it has step, layer"):
        trace.where(owner=1)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_columns_are_refused(write, kind):
    change, message = DAMAGE[kind]
    with pytest.raises(TraceError, match=message) as refused:
        Trace.load(write(change))
    assert "rank0001.safetensors" in str(refused.value)


def test_a_dispatch_of_ones_own_leaves_all_places_open(write):
    def leave_open(tensors):
        tensors |= {name: torch.full_like(tensors[name], -1) for name in ("send_row", "receive_row")}

    def alone(tensors):
        tensors["via_rank"] = torch.full_like(tensors["via_rank"], 0)

    own = {"values": False, "options": {"stages": "my_moe"}}
    assert len(Trace.load(write(leave_open, every=True, **own))) == 12
    with pytest.raises(TraceError, match="column send_row, entry 0, is -1, expected 0: where all_to_all puts"):
        Trace.load(write(leave_open, every=True, values=False))
    with pytest.raises(TraceError, match="rank0001.*column send_row, entry 0, is -1, expected 0: where all_to_all"):
        Trace.load(write(leave_open, **own))
    with pytest.raises(TraceError, match="is -1, expected 0: where all_to_all puts"):
        Trace.load(write(both(leave_open, alone), every=True, **own))
    with pytest.raises(TraceError, match="column send_row, entry 0, is -1, expected 0 or more: values are recorded"):
        Trace.load(write(leave_open))
    with pytest.raises(TraceError, match="receive_row, entry 1, is -1, .* more: places of other routes are known"):
        Trace.load(write(put("receive_row", 1, -1), values=False))


def test_a_new_recording_takes_the_figures_of_an_earlier_one_away(tmp_path):
    """Else a run that fails leaves a folder with the text of another."""
    for name in ("meta.json", "run.json"):
        (tmp_path / name).write_text("{}")
    write_rank(tmp_path, 1, Recorder(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"meta.json", "run.json", "rank0001.safetensors"}
    write_rank(tmp_path, 0, Recorder(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"rank0000.safetensors", "rank0001.safetensors"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FILES = {
    "truncated": (lambda f: cut(f / "rank0001.safetensors"), "rank0001.safetensors of rank 1 cannot be read"),
    "empty": (lambda f: (f / "rank0000.safetensors").write_bytes(b""), "rank0000.safetensors of rank 0 cannot be read"),
    "text": (lambda f: (f / "rank0000.safetensors").write_text("hello"), "rank0000.safetensors of rank 0 cannot be"),
    "gone": (lambda f: (f / "rank0000.safetensors").unlink(), "rank0000.safetensors is missing: .* there are 1 files"),
    "a folder": (lambda f: ((f / "rank0001.safetensors").unlink(), (f / "rank0001.safetensors").mkdir()),
                 "rank0001.safetensors is a folder, expected the file that rank 1 wrote"),
    "one too many": (lambda f: (f / "rank0007.safetensors").write_bytes(b""), "rank0007.safetensors belongs to no ran"),
    "two swapped": (lambda f: swap(f / "rank0000.safetensors", f / "rank0001.safetensors"),
                    "rank0000.safetensors: column source_rank, entry 0, is 1, expected 0 to 0"),
    "no meta": (lambda f: (f / "meta.json").unlink(), "no readable meta.json"),
    "meta that is no JSON": (lambda f: (f / "meta.json").write_text("{"), "no readable meta.json"),
    "meta that is a list": (lambda f: (f / "meta.json").write_text("[]"), r"schema is \[\]"),
    "meta without end": (lambda f: (f / "meta.json").write_text("[" * 100_000), "no readable meta.json"),
    "meta of bytes": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe"), "no readable meta.json"),
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "no readable meta.json"),
}  # fmt: skip


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_refused(write, kind):
    change, message = FILES[kind]
    folder = write()
    change(folder)
    with pytest.raises(TraceError, match=message):
        Trace.load(folder)
