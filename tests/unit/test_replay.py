"""`moe-course replay`: every kind of file gives the same ids, every count is what a loop over rows with sets counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_cases import make_config, make_layer, make_weights
from rich.console import Console
from safetensors.torch import save_file
from trace_cases import files_of, meta_of, texts_of, write_file, write_meta

from moe_course.backends import BACKENDS
from moe_course.backends.capabilities import across_nodes, names_of
from moe_course.backends.configure import configure
from moe_course.cli import main
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.cost.replay import replay
from moe_course.cost.routing import Routing, batches, fit_to_model, number_of_experts, ranks_of_rows
from moe_course.cost.routing_file import read_routing
from moe_course.cost.sizes import row_sizes
from moe_course.cost.tables import print_replay
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement, make_placement
from moe_course.options import TINY
from moe_course.trace.record import Recorder
from moe_course.trace.strict.rows import planned_rows
from moe_course.trace.trace import write_joined, write_rank

ROWS, LAYERS, K, E = 23, 3, 4, 14


def random_ids(rows: int = ROWS, layers: int = LAYERS, gaps: bool = True) -> torch.Tensor:
    """`[T, L, K]`, different experts in a row, some routes of -1, one row without any."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(rows, layers, E, generator=generator).topk(K, dim=2).indices.int()
    if gaps:
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        ids[2] = -1
    return ids


# -- files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, kind: str, ids: torch.Tensor) -> tuple[Path, dict]:
    """Save ids as somebody would; returns the file, and how to read it."""
    array, file = ids.numpy(), folder / f"ids.{kind.partition(' ')[0]}"
    if kind == "npy int16":
        np.save(file, array.astype(np.int16))
    elif kind == "npy fortran":
        np.save(file, np.asfortranarray(array.astype(np.int64)))
    elif kind == "npz requests":
        np.savez(file, first=array[:9], second=array[9:10], third=array[10:])
    elif kind == "npz known name":
        np.savez(file, routed_experts=array, other=array[:1, :, :2])
    elif kind == "npz key":
        np.savez(file, mine=array, other=array[:1, :, :2])
        return file, {"key": "mine"}
    elif kind == "pt":
        torch.save(ids, file)
    elif kind == "pt layers":
        torch.save([ids[:, layer] for layer in range(ids.shape[1])], file)
        return file, {"layout": "LTK"}
    elif kind == "pt dictionary":
        torch.save({"topk_ids": ids.long(), "topk_weights": torch.rand(ids.shape)}, file)
    elif kind == "safetensors":
        save_file({"anything": ids, "topk_weights": torch.rand(ids.shape)}, file)
    elif kind == "json":
        file.write_text(json.dumps(ids.tolist()))
    elif kind == "json dictionary":
        file.write_text(json.dumps({"routed_experts": ids.tolist()}))
    return file, {}


KINDS = (
    "npy int16", "npy fortran", "npz requests", "npz known name", "npz key", "pt", "pt layers", "pt dictionary",
    "safetensors", "json", "json dictionary",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_files_say_the_same(tmp_path, kind):
    ids = random_ids()
    file, how = write(tmp_path, kind, ids)
    routing = read_routing(file, **how)
    assert torch.equal(routing.ids, ids) and routing.ids.dtype == torch.int32
    assert routing.layers == (0, 1, 2) and routing.rank is None
    assert any("3 arrays" in note for note in routing.notes) == (kind == "npz requests")


def test_two_dimensions_are_one_layer(tmp_path):
    np.save(tmp_path / "ids.npy", random_ids().numpy()[:, 1])
    assert torch.equal(read_routing(tmp_path / "ids.npy").ids[:, 0], random_ids()[:, 1])


def write_trace(folder: Path, ids: torch.Tensor, rank: torch.Tensor, step: torch.Tensor, **plan) -> None:
    """The files of `moe-course run --trace`, with a router that left routes out; those are not in them."""
    parts, steps = [], range(int(step.max()) + 1)
    rows = [[int(((rank == r) & (step == s)).sum()) for r in range(3)] for s in steps]
    for r in range(3):
        row, layer, k = ((ids >= 0) & (rank == r)[:, None, None]).nonzero(as_tuple=True)
        first = torch.tensor([int(((rank == r) & (step == s) & (torch.arange(len(rank)) < i)).sum()) for i, s in
                              enumerate(step.tolist())])  # fmt: skip
        columns = {"step": step[row], "layer": layer + 1, "row": first[row], "k": k}
        parts.append(columns | {"expert": ids[row, layer, k].long()})
    meta = meta_of(3, E, top_k=K, options={"stages": "my_moe"}, plan=plan, **texts_of(rows))
    write_all(folder, meta, parts)


def write_all(folder: Path, meta: dict, parts: list[dict[str, torch.Tensor]]) -> None:
    for r, tensors in enumerate(files_of(meta, parts)):
        write_file(folder, r, tensors)
    write_meta(folder, meta, [len(part["row"]) for part in parts])


def test_a_trace_knows_ranks_steps_and_layers(tmp_path):
    ids = random_ids()
    ids = ids[(ids >= 0).any(dim=2).any(dim=1)]  # a row without any route leaves no trace
    rank, step = torch.arange(len(ids)) % 3, torch.arange(len(ids)) // 12
    write_trace(tmp_path, ids, rank, step)
    routing = read_routing(tmp_path)
    order = torch.arange(len(ids)).numpy()
    order = sorted(order, key=lambda i: (int(step[i]), int(rank[i]), i))
    assert torch.equal(routing.ids, ids[order])
    assert torch.equal(routing.rank, rank[order]) and torch.equal(routing.step, step[order])
    assert routing.layers == (1, 2, 3)
    assert torch.equal(ranks_of_rows(routing, 3, None), rank[order])  # as recorded
    assert torch.equal(ranks_of_rows(routing, 2, None), torch.arange(len(ids)) * 2 // len(ids))  # fewer: cannot be
    with pytest.raises(ConfigError, match=r"recorded on 3 ranks or more, --world-size is 2; use --rows-of contiguous"):
        ranks_of_rows(routing, 2, "trace")
    for batch in batches(routing, routing.rank, 3, 3):
        assert max(map(len, batch)) <= 3
        assert len({int(routing.step[row]) for rows in batch for row in rows}) == 1
    assert sum(len(rows) for batch in batches(routing, routing.rank, 3, 3) for rows in batch) == len(ids)


def test_rows_that_tp_ranks_shared_are_put_together_again(tmp_path):
    """Without dispatch every rank holds all rows, and records the routes to its own experts."""
    ids = random_ids(6)
    ids[2, :, 0] = 5  # no row without routes
    placement, parts = make_placement(3, E), []
    for r in range(3):
        owner = torch.where(ids >= 0, placement.owner[ids.long().clamp(min=0)], -1)
        mine = torch.where(owner == r, ids, -1)
        row, layer, k = (mine >= 0).nonzero(as_tuple=True)
        columns = {"step": torch.zeros_like(row), "layer": layer + 1, "row": row, "k": k}
        parts.append(columns | {"expert": mine[row, layer, k].long()})
    plan = {"dp": 1, "tp": 3, "dispatch_group": None, "reduce_group": "tp"}
    shape = {"backend": "no_dp_ep", "shape": "no_dp_ep", "options": {"stages": "my_moe"}}
    write_all(tmp_path, meta_of(3, E, top_k=K, plan=plan, **shape, **texts_of([[6]])), parts)
    routing = read_routing(tmp_path)
    assert torch.equal(routing.ids, ids) and routing.rank is None
    assert "TP ranks shared" in routing.notes[0]


BAD = {
    "floats.npy": (lambda f: np.save(f, np.random.rand(3, 2, 4)), r"\[3, 2, 4\] and dtype float64.*topk"),
    "four.npy": (lambda f: np.save(f, np.zeros((3, 2, 4, 1), int)), r"\[3, 2, 4, 1\] and dtype int64, expected"),
    "empty.npy": (lambda f: np.save(f, np.zeros((0, 2, 4), int)), r"shape \[0, 2, 4\] has no routes"),
    "pickle.npy": (lambda f: np.save(f, np.array([{}], object), allow_pickle=True), r"cannot be read as .npy"),
    "zeros.npy": (lambda f: np.save(f, np.zeros((3, 2, 4), int)), "all ids are 0 in all 2 layers"),
    "below.npy": (lambda f: np.save(f, -2 * np.ones((3, 2, 4), int)), "id -2 at row 0, layer 0, k 0"),
    "far.npy": (lambda f: np.save(f, 2**40 * np.ones((3, 2, 4), int)), "id 1099511627776 at row 0, layer 0, k 0"),
    "wrapped.npy": (lambda f: np.save(f, (-(2**32) + 7) * np.ones((3, 2, 4), int)), "id -4294967289 at row 0"),
    "huge.npy": (lambda f: np.save(f, np.full((3, 2, 4), 2**31 - 1)), "id 2147483647 at row 0.* 0 to 65535"),
    "none.npy": (lambda f: np.save(f, np.full((3, 2, 4), -1)), "all ids are -1"),
    "sparse.pt": (lambda f: torch.save(torch.eye(3).long().to_sparse(), f), "something else than an array of ids"),
    "narrow.npy": (lambda f: np.save(f, np.array([[[1, 200]]]).astype(np.int8)), "id -56 .*too small"),
    "damaged.npz": (lambda f: f.write_bytes(b"PK nothing"), "damaged.npz"),
    "which.npz": (
        lambda f: np.savez(f, a=np.zeros((3, 2, 4), int), b=np.zeros((3, 2, 5), int)),
        r"--key NAME says it. It has: a \[3, 2, 4\] int64, b \[3, 2, 5\] int64",
    ),
    "weights.safetensors": (lambda f: save_file({"w": torch.rand(3, 4)}, f), r"It has: w \[3, 4\] float32"),
    "module.pt": (lambda f: torch.save(Path("x"), f), "cannot be read as .pt"),
    "ragged.json": (lambda f: f.write_text("[[[1, 2]], [[1]]]"), "not all as long"),
    "text.json": (lambda f: f.write_text("no"), "cannot be read as .json"),
    "words.json": (lambda f: f.write_text('"ids"'), "holds a str"),
    "ids.csv": (lambda f: f.write_text("1,2"), ".csv is not a known suffix"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named(tmp_path, name):
    make, message = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=message) as refused:
        read_routing(tmp_path / name)
    assert name in str(refused.value)


def test_a_file_that_is_not_there_and_a_key_that_is_not_in_it(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_routing(tmp_path / "nothing.npy")
    np.savez(tmp_path / "a.npz", mine=random_ids().numpy())
    with pytest.raises(ConfigError, match="has no 'yours'; --key is one of: mine"):
        read_routing(tmp_path / "a.npz", key="yours")
    np.save(tmp_path / "a.npy", random_ids().numpy())
    with pytest.raises(ConfigError, match="leave --key mine out"):
        read_routing(tmp_path / "a.npy", key="mine")
    with pytest.raises(ConfigError, match="--layout is 'KLT'"):
        read_routing(tmp_path / "a.npy", layout="KLT")


def test_pickled_code_does_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save(Trap(), tmp_path / "trap.pt")
    with pytest.raises(ConfigError):
        read_routing(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


# -- layers, experts, rows --------------------------------------------------------------------------------------------


def test_dense_layers_are_left_out(tmp_path):
    """vLLM's capture has a place for every layer; what nobody wrote is 0 (vllm-project/vllm#28284)."""
    ids = random_ids(layers=5, gaps=False)
    ids[:, :2] = 0
    np.save(tmp_path / "ids.npy", ids.numpy())
    routing = read_routing(tmp_path / "ids.npy")
    assert routing.layers == (2, 3, 4) and torch.equal(routing.ids, ids[:, 2:])
    assert routing.notes == ("left out layers 0, 1: all their ids are 0, as of a dense layer",)


def test_a_model_says_which_layers_and_how_many_experts():
    config = MoEConfig.from_pretrained(TINY)
    ids = torch.rand(5, 3, 256).topk(8, dim=2).indices.int()
    routing = Routing("f", ids, (0, 1, 2))
    assert config.sparse_layers == (1, 2)
    fitted = fit_to_model(routing, config, "tiny")  # three layers, the first of them dense
    assert fitted.layers == (1, 2) and torch.equal(fitted.ids, ids[:, 1:]) and "1 dense layers" in fitted.notes[0]
    only = fit_to_model(Routing("f", ids[:, 1:], (0, 1)), config, "tiny")  # the sparse ones
    assert only.layers == (1, 2) and torch.equal(only.ids, ids[:, 1:]) and not only.notes
    odd = fit_to_model(Routing("f", torch.cat([ids, ids], 1), tuple(range(6))), config, "tiny")
    assert odd.notes == ("6 layers in the file, tiny has 2 sparse ones of 3",)
    with pytest.raises(ConfigError, match=r"f: shape \[5, 3, 4\] has K = 4, --model tiny chooses 8"):
        fit_to_model(Routing("f", ids[..., :4], (0, 1, 2)), config, "tiny")
    assert number_of_experts(routing, None, config) == (256, routing)
    assert number_of_experts(routing, 300, config)[0] == 300


def test_experts_that_do_not_exist():
    routing = Routing("f", torch.tensor([[[1, 2]], [[3, 57]]]).int(), (9,))
    total, noted = number_of_experts(routing, None, None)
    assert total == 64 and noted.notes[0].startswith("the largest id is 57, taken as 64 experts")
    with pytest.raises(ConfigError, match="f: id 57 at row 1, layer 9, k 1; --experts is 57, so ids end with 56"):
        number_of_experts(routing, 57, None)
    assert number_of_experts(routing, 58, None)[0] == 58


def test_whose_rows():
    routing = Routing("f", random_ids(10), (0, 1, 2))
    assert ranks_of_rows(routing, 4, None).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert ranks_of_rows(routing, 4, "round_robin").tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    with pytest.raises(ConfigError, match="f does not say which rank"):
        ranks_of_rows(routing, 4, "trace")
    with pytest.raises(ConfigError, match="'mine', known values: contiguous"):
        ranks_of_rows(routing, 4, "mine")
    assert [len(rows) for rows in next(batches(routing, ranks_of_rows(routing, 3, None), 3, 99))] == [4, 3, 3]


def test_rows_with_an_expert_twice_are_said(tmp_path):
    ids = random_ids(gaps=False)
    ids[4, 1, 2] = ids[4, 1, 0]
    ids[5, 1] = -1  # no routes is no repetition
    np.save(tmp_path / "ids.npy", ids.numpy())
    assert read_routing(tmp_path / "ids.npy").notes[0].startswith("1 of 69 rows name an expert twice")


# -- counts -----------------------------------------------------------------------------------------------------------


def by_hand(ids: torch.Tensor, rank: torch.Tensor, placement: Placement) -> dict:
    """Rows on the wire of the simple shapes, with a loop over rows and Python sets."""
    owner, size = placement.owner.tolist(), placement.ep_size
    node = {r: n for n, ranks in enumerate(placement.nodes) for r in ranks}
    routes = once = logical = nodes_out = owners_elsewhere = 0
    for row in range(ids.shape[0]):
        for layer in range(ids.shape[1]):
            here = int(rank[row])
            owners = [owner[e] for e in ids[row, layer].tolist() if e >= 0]
            routes += sum(o != here for o in owners)
            once += len(set(owners) - {here})
            logical += len(set(owners))
            nodes_out += len({node[o] for o in owners} - {node[here]})
            owners_elsewhere += sum(node[o] != node[here] for o in set(owners))
    cells = ids.shape[0] * ids.shape[1]
    return {
        "routes": routes, "once": once, "logical": logical, "nodes_out": nodes_out, "elsewhere": owners_elsewhere,
        "gathered": cells * (size - 1),
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("nodes", [0, 2, (1, 4)])
def test_counts_are_those_of_a_loop(strategy, nodes):
    ids, placement = random_ids(), make_placement(5, E, strategy, ranks_per_node=nodes)
    routing, seen = Routing("f", ids, (0, 1, 2)), []
    rank = ranks_of_rows(routing, 5, None)
    sizes = row_sizes(128, "bfloat16", "fp8_group")
    found = replay(
        routing, rank, placement, sizes, max_num_tokens=3, hidden_size=128, progress=lambda *n: seen.append(n)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    lines, hand = {line["backend"]: line for line in found["backends"]}, by_hand(ids, rank, placement)
    for name, key in (("allgather_reducescatter", "gathered"), ("all_to_all", "routes"), ("low_latency", "routes"),
                      ("high_throughput", "once"), ("one_sided", "once")):  # fmt: skip
        assert lines[name]["rows"] == {"dispatch": hand[key], "combine": hand[key]}, name
    assert lines["high_throughput"]["rows_logical"]["dispatch"] == hand["logical"]
    assert lines["two_hop"]["rows_across_nodes"] == {"dispatch": hand["nodes_out"], "combine": hand["elsewhere"]}
    if nodes:
        across = lines["two_hop, sums in node"]["rows_across_nodes"]
        assert across == {"dispatch": hand["nodes_out"], "combine": hand["nodes_out"]}
    out, partial, output = 128 + 4, 512, 256
    assert lines["high_throughput"]["bytes"]["wire"] == hand["once"] * (out + partial)
    assert lines["all_to_all"]["bytes"]["wire"] == hand["routes"] * (out + output)
    assert lines["high_throughput"]["bytes"]["logical"] == hand["logical"] * (out + partial)
    assert lines["high_throughput"]["metadata_bytes"] == hand["once"] * K * 8
    assert lines["one_sided"]["metadata_bytes"] == hand["once"] * K * 8
    assert lines["one_sided"]["padding_bytes"] == hand["once"] * 12  # 132 + 32 fill up to 176
    # T_max 3, at most 5 rows a rank: two batches, three layers
    places = 2 * LAYERS * 3 * sum(E - placement.num_local(r) for r in range(5))
    assert lines["low_latency"]["padding_bytes"] == (places - hand["routes"]) * (out + output)
    assert lines["low_latency"]["fill"] == pytest.approx(int((ids >= 0).sum()) / (2 * LAYERS * 3 * E * 5))
    assert lines["low_latency"]["buffer_bytes"] == E * 3 * out
    assert lines["low_latency"]["selection_bytes"] == int((ids >= 0).sum()) * (out + 16 + 256)
    assert lines["high_throughput"]["padding_bytes"] == 0
    # a random router would send as many routes of each rank elsewhere as there are experts elsewhere
    live = [int((ids[rank == r] >= 0).sum()) for r in range(5)]
    uniform = sum(n * (1 - placement.num_local(r) / E) for r, n in enumerate(live))
    assert lines["all_to_all"]["uniform"]["rows"]["dispatch"] == pytest.approx(uniform)
    load = torch.zeros(LAYERS, 5)
    for row, layer, k in (ids >= 0).nonzero().tolist():
        load[layer, placement.owner[ids[row, layer, k].long()]] += 1
    assert found["imbalance"]["routes_per_rank"] == load.sum(0).int().tolist()
    assert found["imbalance"]["per_layer"] == pytest.approx((load.max(1).values / load.mean(1)).tolist())
    worst = int((load.max(1).values / load.mean(1)).argmax())
    assert found["imbalance"]["worst_layer"]["layer"] == worst
    assert found["imbalance"]["max_over_mean"] == pytest.approx(float(load.sum(0).max() / load.sum(0).mean()))


def test_observed_over_uniform():
    """A router that is as even as can be is at 1; one that keeps a row's experts together is below."""
    ids = torch.rand(4000, 1, E, generator=torch.Generator().manual_seed(0)).topk(K, dim=2).indices.int()
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = -1
    placement, sizes = make_placement(5, E, ranks_per_node=2), row_sizes(128)

    def ratios(ids: torch.Tensor) -> dict[str, float]:
        routing = Routing("f", ids, (0,))
        found = replay(routing, ranks_of_rows(routing, 5, "round_robin"), placement, sizes)
        return {line["backend"]: line["observed_over_uniform"] for line in found["backends"]}

    even = ratios(ids)
    assert even["allgather_reducescatter"] == 1
    assert list(even.values()) == pytest.approx([1.0] * len(even), abs=0.02)
    near = torch.arange(K).int().expand(4000, 1, K)  # experts 0 to 3: ranks 0 and 1
    kept = ratios(near)
    assert kept["high_throughput"] < 0.7 and kept["all_to_all"] == pytest.approx(1, abs=0.1)
    lonely = ratios(torch.full((40, 1, K), -1).int())
    assert lonely["all_to_all"] is None and lonely["allgather_reducescatter"] == 1


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    np.save(tmp_path / "ids.npy", random_ids().numpy().astype(np.int16))
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "ids.npy"), "--ranks", "4", "--ranks-per-node", "1,3", "--experts", str(E)]
    more = ["--hidden-size", "256", "--dispatch-quant", "fp8_token", "--combine-dtype", "bfloat16", "--json", str(out)]
    assert main(["replay", *arguments, *more]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert found["schema"] == "moe_course.replay/1" and found["experts"] == E and found["world_size"] == 4
    assert found["ranks_per_node"] == [1, 3]
    assert found["row_bytes"] == {"dispatch": 260, "partial": 512, "contribution": 512}
    assert [line["backend"] for line in found["backends"]] == [
        "allgather_reducescatter", "all_to_all", "high_throughput", "low_latency", "two_hop", "two_hop, sums in node",
        "one_sided",
    ]  # fmt: skip
    words = " ".join(shown.split())
    for word in ("deepep_low_latency, nixl_ep", "imbalance", "x uniform", "note: counted as if all rows went out as"):
        assert word in words
    assert "note: across nodes, vLLM's deepep_high_throughput, mori_high_throughput, mori_low_latency: " in words
    assert found["notes"][-2:] == across_nodes()
    assert main(["replay", *arguments[:3], *arguments[5:], "--json", str(out)]) == 0  # one node
    assert "across nodes" not in " ".join([*json.loads(out.read_text())["notes"], capsys.readouterr().out])


def test_empty_places_are_memory_and_not_on_the_wire(capsys, monkeypatch):
    """Libraries send rows; what whole segments add is said of gloo and NCCL, and stands in no column of the table."""
    ids = random_ids()
    for places in (5, 500):
        found = replay(
            Routing("f", ids, (0, 1, 2)), ranks_of_rows(Routing("f", ids, (0, 1, 2)), 5, None), make_placement(5, E),
            row_sizes(128), max_num_tokens=places,
        )  # fmt: skip
        lines = {line["backend"]: line for line in found["backends"]}
        padded, plain = lines["low_latency"], lines["all_to_all"]  # the same rows, with places and without
        assert padded["bytes"] == plain["bytes"] and padded["rows"] == plain["rows"]
        assert padded["buffer_bytes"] == E * places * 256 and padded["padding_bytes"] > 0 == plain["padding_bytes"]
        console = Console(width=160, highlight=False)
        print_replay(console, found)
        text = capsys.readouterr().out
        words = " ".join(text.split())
        head, rest = words.split("stands for, in one node", 1)
        (cells,) = (line.split() for line in text.splitlines() if line.lstrip().startswith("low_latency "))
        assert cells[8] == f"{padded['buffer_bytes'] / 1e6:,.1f}" and (places == 5 or float(cells[8]) > 1)
        assert "padding" not in words and "buffer MB" in head
        more = f"{padded['padding_bytes'] / ids.shape[0] / ids.shape[1] / 1e3:,.1f} kB"
        assert f"gloo and NCCL carry whole segments here: for low_latency {more} more for a row in a layer." in rest
        assert "kB: 10^3 bytes, MB: 10^6 bytes." in rest
        wire = f"{plain['bytes']['wire'] / ids.shape[0] / ids.shape[1] / 1e3:,.1f}"
        assert words.count(f" {wire} ") >= 2  # of both lines
        assert "DeepEP and NIXL send rows and counts only" in rest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "5"], "--experts is 5, so ids end with 4"),
        (["--ranks", "20", "--experts", "14"], "14 experts cannot be spread over 20 EP ranks"),
        (["--ranks", "0"], "--world-size is 0, needs to be at least 1"),
        (["--model", "tiny"], r"has K = 4, --model tiny chooses 8"),
        (["--dtype", "float8"], "'float8' is not one of"),
        (["--dispatch-quant", "fp4"], "'fp4' is not one of"),
        (["--hidden-size", "100", "--dispatch-quant", "fp8_group"], "100"),
        (["--ranks-per-node", "3,3"], "ranks_per_node 3,3 has 6 ranks, the EP group 8"),
        (["--rows-of", "me"], "--rows-of is 'me'"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, arguments, message):
    np.save(tmp_path / "ids.npy", random_ids().numpy())
    assert main(["replay", str(tmp_path / "ids.npy"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"no_dp_ep"}))
def test_a_replayed_trace_moves_what_the_ledger_of_its_run_counted(tmp_path, name):
    """Real layers in threads, recorded as a run is; the replay knows nothing but the files."""
    config, ranks, folder = make_config(9, 3, 16, 8), 3, tmp_path / "trace"
    weights, placement = make_weights(config, torch.float32), make_placement(3, 9, ranks_per_node=2)
    steps, backend = [[4, 0, 6], [1, 0, 1]], configure(name, max_num_tokens=6)
    texts = texts_of(steps)
    meta = meta_of(ranks, 9, top_k=3, plan={"nodes": [2, 1]}, backend=names_of(name)[0], shape=name,
                   capacity=backend.capacity, **texts)  # fmt: skip

    def run(comm):
        recorder = Recorder()
        layer = make_layer(weights, placement, comm, backend, layer=1, on_event=recorder)
        comm.ledger = Ledger()
        for step, places in enumerate(planned_rows(meta)[comm.rank]):
            comm.step, rows = step, torch.randn(len(places), 16)
            tokens = [(texts["prompts"][p]["tokens"] + texts["new_tokens"][p])[at] for p, at in places]
            recorder.on_pass(step, torch.tensor(tokens).long(), places)
            layer(rows)
        ledger, comm.ledger = comm.ledger, Ledger()
        write_rank(folder, comm.rank, recorder, {})
        return ledger

    counted = Ledger.merge(run_threads(ranks, run)).total()
    write_joined(folder, meta)
    routing = read_routing(folder)
    rank, sizes = ranks_of_rows(routing, ranks, None), row_sizes(16, "float32")
    found = replay(routing, rank, placement, sizes, max_num_tokens=6)
    line = next(line for line in found["backends"] if line["backend"] == name)
    assert len(routing.ids) == 12 and found["batches"] == 2
    assert line["rows"]["dispatch"] + line["rows"]["combine"] == counted.rows
    assert line["bytes"]["wire"] == counted.payload > 0
    assert line["padding_bytes"] == counted.padding
    assert line["metadata_bytes"] <= counted.metadata  # the ledger has headers, too
    if name == "high_throughput":  # two exchanges of nine fields and two lists of R, to each peer, on two steps
        assert counted.metadata - line["metadata_bytes"] == 2 * 2 * ranks * (ranks - 1) * (10 + 2 * ranks) * 8
