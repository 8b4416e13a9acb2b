"""Which backend runs, over which group, and why: upstream's decisions, typed by hand from its sources.

Each row names the rule it comes from:

* "order": `all2all_utils.py : maybe_make_prepare_finalize`: no all2all with dp > 1 is all-gather, without dp nothing
  travels, and only then does the name count;
* "make": `fused_moe/config.py : FusedMoEParallelConfig.make`, the decision table;
* "four": the four useful deployments; "sp": `use_sequence_parallel_moe`; "naive": `AgRsAll2AllManager._get_comm_group`;
* "names": `config/parallel.py`, old names; "managers": `cuda_communicator.py`, one for each name;
* "placement": `expert_map_manager.py`, round robin; "uneven": who needs E % R = 0; "reduced": `output_is_reduced`;
* "pitfall": TP peers that dispatch duplicate rows; "ours": not in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib.machinery import ModuleSpec

import pytest

from moe_course.backends import BACKENDS
from moe_course.backends import select as select_module
from moe_course.backends.capabilities import (
    KNOWN_BACKENDS,
    LOW_LATENCY_HIDDEN_SIZES,
    OLD_NAMES,
    SHAPES,
    current_name,
    names_of,
    upstream_hidden_size,
)
from moe_course.backends.select import AVAILABLE, SEQUENCE_PARALLEL_BACKENDS, VENDOR_PACKAGES, select
from moe_course.backends.support import SUPPORT, TRANSPORTS, check_support, pick_transport
from moe_course.config import GLM_5_1
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.expert_map import ROUND_ROBIN_BACKENDS
from moe_course.parallel import ParallelConfig, Plan, make_plan
from moe_course.quant import when
from moe_course.quant.policy import WHEN

AG, HT, LL = "allgather_reducescatter", "high_throughput", "low_latency"


@dataclass(frozen=True)
class Row:
    """One configuration and what must come of it; `says` are words of the reason or of a note."""

    source: str
    backend: str
    sizes: tuple[int, int, int]  # tp, dp, pcp
    runs: str
    dispatch: str | None
    reduce: str | None = None
    split: str | None = None
    says: tuple[str, ...] = ()
    ep: bool = True
    sp: bool | None = None
    asked: str = "linear"
    placed: str = "linear"
    groups: int = 1  # of experts, n_group
    experts: int = 256

    def plan(self) -> Plan:
        tp, dp, pcp = self.sizes
        parallel = ParallelConfig(
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            prefill_context_parallel_size=pcp,
            enable_expert_parallel=self.ep,
            sequence_parallel_moe=self.sp,
            all2all_backend=self.backend,
            expert_placement_strategy=self.asked,
        )
        return make_plan(parallel, replace(GLM_5_1, n_group=self.groups, n_routed_experts=self.experts))


OVER_EP, TWICE = "over the EP group to the ranks that own", "every route is computed 2 times"
ROWS = [
    # nothing travels: the name does not count
    Row("order 4, four 2", AG, (4, 1, 1), "no_dp_ep", None, "tp", says=("dp = pcp = 1",)),
    Row("order 4, four 2", "deepep_high_throughput", (4, 1, 1), "no_dp_ep", None, "tp", says=("dp = pcp = 1",)),
    Row("order 4, four 2", "nixl_ep", (8, 1, 1), "no_dp_ep", None, "tp", says=("so nixl_ep is not used",)),
    Row("order 4, four 1", "deepep_low_latency", (4, 1, 1), "no_dp_ep", None, "tp", ep=False, says=("not used",)),
    Row("make, flat 1", "deepep_v2", (1, 1, 1), "no_dp_ep", None, says=("changes nothing: dp * pcp * tp = 1",)),
    Row("ours", "two_hop", (2, 1, 1), "no_dp_ep", None, "tp", says=("two_hop is not used", "not in vLLM")),
    # EP off, rows differ: all-gather, whatever the name
    Row("order 3, four 3", AG, (1, 4, 1), AG, "dp", ep=False, says=("Falling back to AllGather+ReduceScatter",)),
    Row("order 3, four 3", "deepep_low_latency", (1, 4, 1), AG, "dp", ep=False, says=("Falling back", "slice of each")),
    Row("order 3, four 3", "flashinfer_nvlink_one_sided", (2, 4, 1), AG, "dp", "tp", ep=False, says=("Falling back",)),
    Row("order 3", "all_to_all", (1, 2, 1), AG, "dp", ep=False, says=("expert parallelism is off",)),
    Row("order 4, runner gathers", "mori_low_latency", (1, 1, 4), AG, "pcp", None, "pcp", ep=False,
        says=("prefill-context-parallel ranks have to meet all slices",)),
    # all-gather and its old names
    Row("naive, dp > 1", AG, (1, 4, 1), AG, "dp", says=("between data-parallel ranks",)),
    Row("naive, pcp", AG, (1, 1, 4), AG, "pcp", None, "pcp", says=("between prefill-context-parallel ranks",)),
    Row("naive, sp", AG, (2, 4, 1), AG, "ep", None, "tp", says=("from each TP rank its slice",)),
    Row("naive, not EP", AG, (2, 4, 1), AG, "dp", "tp", sp=False, says=("send each of them 2 times",)),
    Row("names", "naive", (1, 4, 1), AG, "dp", says=("naive is an old name, allgather_reducescatter runs",)),
    Row("names", "pplx", (2, 4, 1), AG, "ep", None, "tp", says=("pplx is an old name",)),
    Row("names", "flashinfer_all2allv", (1, 4, 1), HT, "ep", says=("flashinfer_nvlink_two_sided runs instead",)),
    # one shape for each manager; the output is reduced, so no TP sum is left
    Row("managers, reduced", "deepep_high_throughput", (1, 4, 1), HT, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "mori_high_throughput", (1, 4, 1), HT, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "mori_low_latency", (1, 4, 1), HT, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "flashinfer_nvlink_two_sided", (1, 4, 1), HT, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "deepep_low_latency", (1, 4, 1), LL, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "nixl_ep", (1, 4, 1), LL, "ep", says=(OVER_EP,)),
    Row("managers, reduced", "deepep_v2", (1, 4, 1), "two_hop", "ep", says=(OVER_EP,)),
    Row("managers, reduced", "flashinfer_nvlink_one_sided", (1, 4, 1), "one_sided", "ep", says=(OVER_EP,)),
    Row("ours", "all_to_all", (1, 4, 1), "all_to_all", "ep", says=("all_to_all is a name of this package, not",)),
    Row("ours", "two_hop", (1, 4, 1), "two_hop", "ep", says=("not in vLLM: with --reduce-in-node it is what",)),
    # sequence parallel
    Row("sp", "deepep_high_throughput", (2, 4, 1), HT, "ep", None, "tp", says=("from each TP rank its slice",)),
    Row("sp", "deepep_low_latency", (2, 4, 1), LL, "ep", None, "tp", says=("from each TP rank its slice",)),
    Row("sp", "nixl_ep", (4, 2, 1), LL, "ep", None, "tp", says=("from each TP rank its slice",)),
    Row("sp", "mori_low_latency", (2, 2, 1), HT, "ep", None, "tp", says=("from each TP rank its slice",)),
    Row("sp", "flashinfer_nvlink_one_sided", (2, 4, 1), "one_sided", "ep", None, "tp", says=("its slice",)),
    Row("sp, ours", "all_to_all", (2, 4, 1), "all_to_all", "ep", None, "tp", says=("its slice",)),
    Row("sp, ours", "two_hop", (2, 4, 1), "two_hop", "ep", None, "tp", says=("its slice",)),
    Row("pitfall 26", "deepep_v2", (2, 4, 1), "two_hop", "ep", says=(TWICE, "does not slice rows for deepep_v2")),
    Row("pitfall 26", "flashinfer_nvlink_two_sided", (2, 4, 1), HT, "ep", says=(TWICE, "does not slice rows")),
    Row("sp, off by flag", "deepep_low_latency", (2, 4, 1), LL, "ep", sp=False, says=(TWICE,)),
    Row("sp needs dp > 1", "mori_high_throughput", (2, 1, 4), HT, "ep", None, "pcp", says=(TWICE,)),
    Row("make, pcp", "deepep_high_throughput", (1, 1, 4), HT, "ep", None, "pcp", says=(OVER_EP,)),
    # placement
    Row("placement, LL", "deepep_low_latency", (1, 4, 1), LL, "ep", asked="round_robin",
        placed="round_robin", groups=8),
    Row("placement, NIXL", "nixl_ep", (1, 4, 1), LL, "ep", asked="round_robin", placed="round_robin", groups=8),
    Row("placement, HT", "deepep_high_throughput", (1, 4, 1), HT, "ep", asked="round_robin", groups=8,
        says=("backend deepep_high_throughput has no routing tables",)),
    Row("placement, V2", "deepep_v2", (1, 4, 1), "two_hop", "ep", asked="round_robin", groups=8,
        says=("backend deepep_v2 has no routing tables",)),
    Row("placement, AG", "pplx", (1, 4, 1), AG, "dp", asked="round_robin", groups=8,
        says=("backend allgather_reducescatter has no routing tables",)),
    Row("placement, GLM", "deepep_low_latency", (1, 4, 1), LL, "ep", asked="round_robin", says=("n_group 1",)),
    Row("placement, TP alone", "deepep_v2", (4, 1, 1), "no_dp_ep", None, "tp", asked="round_robin",
        placed="round_robin", groups=8),
    # E % R
    Row("uneven, AG", AG, (1, 6, 1), AG, "dp", says=("fine here and on vLLM's all-gather path",)),
    Row("uneven, HT", "deepep_high_throughput", (1, 6, 1), HT, "ep", says=("upstream needs E % R = 0 here",)),
    Row("uneven, LL", "deepep_low_latency", (1, 4, 1), LL, "ep", experts=10, says=("upstream needs E % R = 0 here",)),
    Row("uneven, ours", "two_hop", (1, 3, 1), "two_hop", "ep", says=("256 experts on 3 ranks: fine here",)),
]  # fmt: skip


def check(row: Row, decide=Row.plan) -> None:
    """Raise AssertionError unless the plan is that of the row, in numbers and in words."""
    made = decide(row)
    assert made.backend.name == made.shape == row.runs, "backend"
    assert (made.dispatch_group, made.reduce_group, made.split_group) == (row.dispatch, row.reduce, row.split), "groups"
    assert made.placement.strategy == row.placed, "placement"
    assert made.backend.requested == row.backend
    text = "\n".join([made.backend.reason, *made.notes])
    for words in row.says:
        assert words in text, f"{words!r} is not in {text!r}"
    twice = made.dispatch_group == "ep" and row.sizes[0] > 1 and not made.sequence_parallel
    assert (f"every route is computed {row.sizes[0]} times" in text) == twice, "duplicates"
    assert ("not in vLLM" in text) == (row.backend in ("all_to_all", "two_hop")), "mark"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source}: {row.backend} {row.sizes}")
def test_upstreams_decisions(row):
    check(row)


def test_the_table_is_large_enough():
    """Every name, with and without expert parallelism, and every combination of groups that there is."""
    assert len(ROWS) >= 30 and {row.backend for row in ROWS} == set(AVAILABLE)
    assert {row.runs for row in ROWS} == set(SHAPES) == set(BACKENDS)
    assert len({(row.dispatch, row.reduce, row.split) for row in ROWS}) >= 8


# -- selectors that are known to be wrong ----------------------------------------------------------------------------


def used_although_nothing_travels(row: Row) -> Plan:
    made = row.plan()
    return replace(made, backend=replace(made.backend, name=KNOWN_BACKENDS[made.backend.backend].shape))


def default_for_all(row: Row) -> Plan:
    made = row.plan()
    return replace(made, backend=replace(made.backend, name=AG)) if made.moe.use_all2all else made


def dp_group_for_all(row: Row) -> Plan:
    made = row.plan()
    over_ep = made.dispatch_group == "ep" and not made.sequence_parallel
    return replace(made, dispatch_group="dp") if over_ep else made


def ep_group_for_all(row: Row) -> Plan:
    made = row.plan()
    return replace(made, dispatch_group=made.dispatch_group and "ep")


def sum_again_over_tp(row: Row) -> Plan:
    made = row.plan()
    return replace(made, reduce_group="tp" if row.sizes[0] > 1 and not made.sequence_parallel else None)


def placement_by_module(row: Row) -> Plan:
    """The module's name in the place of vLLM's: low latency would lose its round robin."""
    made = row.plan()
    if made.moe.use_all2all and made.placement.strategy == "round_robin":
        return replace(made, placement=replace(made.placement, strategy="linear"))
    return made


def round_robin_for_all(row: Row) -> Plan:
    made = row.plan()
    return replace(made, placement=replace(made.placement, strategy=row.asked))


def slices_for_all(row: Row) -> Plan:
    made, (tp, dp, _) = row.plan(), row.sizes
    return replace(made, split_group="tp") if row.ep and tp > 1 and dp > 1 else made


def silent(row: Row) -> Plan:
    made = row.plan()
    return replace(made, notes=())


WRONG = [
    used_although_nothing_travels, default_for_all, dp_group_for_all, ep_group_for_all, sum_again_over_tp,
    placement_by_module, round_robin_for_all, slices_for_all, silent,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_selectors_are_caught(wrong):
    caught = 0
    for row in ROWS:
        try:
            check(row, wrong)
        except AssertionError:
            caught += 1
    assert 0 < caught < len(ROWS)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["teleport", "", "DeepEP_v2", "deepep", "no_dp_ep"])
@pytest.mark.parametrize("use_all2all", [False, True])
def test_unknown_names_list_the_known_ones(name, use_all2all):
    """Also where nothing travels: a typing error does not wait for a larger machine."""
    with pytest.raises(BackendUnavailable) as caught:
        select(name, use_all2all=use_all2all)
    listed = str(caught.value).split("choose from: ")[1].split(";")[0].split(", ")
    assert repr(name) in str(caught.value) and listed == list(AVAILABLE)


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - set(KNOWN_BACKENDS)))
def test_a_module_is_no_name_and_the_error_says_which_names_stand_for_it(shape):
    with pytest.raises(BackendUnavailable) as caught:
        select(shape, use_all2all=True, dp=2)
    text = str(caught.value)
    if shape == "no_dp_ep":
        assert text.endswith("no_dp_ep runs by itself where no row has to travel")
    else:  # the useful half first
        assert text == f"all2all backend {shape!r} is a shape; its names are {', '.join(names_of(shape))}"


def test_a_name_with_a_slip_is_answered_with_the_one_that_was_meant():
    for slip, meant in (("deepep_low_latencey", "deepep_low_latency"), ("alltoall", "all_to_all")):
        with pytest.raises(BackendUnavailable, match=rf"; did you mean {meant}\?$"):
            select(slip, use_all2all=True, dp=2)
    with pytest.raises(BackendUnavailable) as caught:
        select("pigeon", use_all2all=True, dp=2)
    assert "did you mean" not in str(caught.value)


# -- libraries -------------------------------------------------------------------------------------------------------


def refused(name: str, **more) -> str:
    with pytest.raises(BackendUnavailable) as caught:
        select(name, use_all2all=True, dp=2, transport="vendor", **more)
    return str(caught.value)


@pytest.mark.parametrize(("name", "package"), [*VENDOR_PACKAGES.items(), ("flashinfer_all2allv", "flashinfer")])
def test_a_missing_library_is_named_at_the_start(name, package, monkeypatch):
    monkeypatch.setattr(select_module, "find_spec", lambda found: None)
    says = refused(name)
    assert f"{name!r} needs the package {package}" in says and "is not installed here" in says
    assert f"without --transport vendor, {KNOWN_BACKENDS[current_name(name)].shape} moves" in says


@pytest.mark.parametrize("name", VENDOR_PACKAGES)
def test_a_library_that_is_here_is_refused_for_what_is_true(name, monkeypatch):
    """Upstream's own limits first; where they are kept, that this version has no code for it."""
    monkeypatch.setattr(select_module, "find_spec", lambda found: ModuleSpec(found, None))
    known = KNOWN_BACKENDS[name].uneven_experts
    uneven = refused(name, num_experts=10, ep_size=4)
    assert ("needs E % R = 0, and there are 10 experts on 4 ranks" in uneven) == (known is False)
    fits = {"num_experts": 256, "ep_size": 4, "hidden_size": 6144}
    assert f"{VENDOR_PACKAGES[name]} is installed, and this version has no code that calls it" in refused(name, **fits)
    large = refused(name, **fits | {"hidden_size": 8193})
    assert ("hidden_size 8193 is too large" in large) == (KNOWN_BACKENDS[name].shape == LL)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        (AG, "or one of deepep_high"),
        ("pplx", "or one of deepep"),
        ("all_to_all", "or one of"),
        ("two_hop", "deepep_v2"),
    ],
)
def test_a_shape_without_a_library_cannot_be_a_vendors(name, instead):
    says = refused(name)
    assert f"{current_name(name)} is not the name of one" in says and instead in says


@pytest.mark.parametrize("name", AVAILABLE)
def test_no_library_is_needed_unless_it_is_asked_for(name, monkeypatch):
    monkeypatch.setattr(select_module, "find_spec", lambda found: pytest.fail(f"looked for {found}"))
    assert select(name, use_all2all=True, dp=2).name in BACKENDS


def test_a_plan_for_a_library_is_refused_and_can_be_looked_at():
    """The name stays the library's, so that nobody runs our shape in its place; groups are those of its rows."""
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, all2all_backend="deepep_v2")
    with pytest.raises(BackendUnavailable, match="needs the package deep_ep"):
        make_plan(parallel, GLM_5_1, transport="vendor")
    made = make_plan(parallel, GLM_5_1, strict=False, transport="vendor")
    assert made.backend.name == "deepep_v2" and made.backend.name not in BACKENDS
    assert (made.shape, made.dispatch_group, made.reduce_group) == ("two_hop", "ep", None)
    assert [type(error) for error in made.refusals] == [BackendUnavailable]


# -- transports ------------------------------------------------------------------------------------------------------

CANNOT = {("one_sided", "gloo"), ("one_sided", "nccl")}


def test_every_shape_has_an_answer_for_every_transport():
    assert set(SUPPORT) == {(shape, by) for shape in BACKENDS for by in TRANSPORTS}
    assert {cell for cell, answer in SUPPORT.items() if answer is not True} == CANNOT


@pytest.mark.parametrize("cell", sorted(CANNOT), ids="-".join)
def test_a_refused_cell_says_what_is_missing_and_what_to_do(cell):
    with pytest.raises(BackendUnavailable, match="memory of its peers.* use .*--transport shm"):
        check_support(*cell)
    flags = ParallelConfig(data_parallel_size=2, all2all_backend="flashinfer_nvlink_one_sided")
    with pytest.raises(BackendUnavailable, match="memory of its peers"):
        make_plan(flags, GLM_5_1, transport=cell[1])
    alone = replace(flags, data_parallel_size=1, tensor_parallel_size=2)  # nothing travels, so nothing is refused
    assert make_plan(alone, GLM_5_1, transport=cell[1]).backend.name == "no_dp_ep"


@pytest.mark.parametrize(
    ("asked", "shape", "device", "one_host", "expected"),
    [
        ("auto", HT, "cpu", True, "gloo"),
        ("auto", HT, "cpu", False, "gloo"),
        ("auto", "two_hop", "cuda", False, "nccl"),
        ("auto", "no_dp_ep", "cuda", True, "nccl"),
        ("auto", "one_sided", "cpu", True, "shm"),
        ("gloo", LL, "cpu", True, "gloo"),
        ("nccl", LL, "cuda", True, "nccl"),
        ("shm", AG, "cpu", True, "shm"),
        ("shm", "one_sided", "cpu", True, "shm"),
        ("vendor", HT, "cpu", True, "gloo"),
        ("vendor", HT, "cuda", True, "nccl"),
    ],
)
def test_the_transport_of_a_run(asked, shape, device, one_host, expected):
    chosen, reason = pick_transport(asked, shape, device, one_host)
    assert chosen == expected and SUPPORT[shape, chosen] is True
    assert reason == "as asked" or asked in ("auto", "vendor")
    assert ("memory that ranks share" in reason) == (asked == "auto" and chosen == "shm")


@pytest.mark.parametrize(
    ("asked", "shape", "device", "one_host", "says"),
    [
        ("threads", HT, "cpu", True, "threads of one process, and a run starts processes; use auto or gloo"),
        ("pigeon", HT, "cpu", True, "--transport pigeon is not known, choose from: auto, threads"),
        ("nccl", HT, "cpu", True, "--transport nccl does not carry cpu tensors here; use auto or gloo"),
        ("gloo", HT, "cuda", True, "--transport gloo does not carry cuda tensors here; use auto or nccl"),
        ("shm", HT, "cuda", True, "--transport shm does not carry cuda tensors here; use auto or nccl"),
        ("shm", HT, "cpu", False, "memory of one host, and this run has several; use auto or gloo"),
        ("shm", "one_sided", "cpu", False, "use auto or gloo, and a backend other than one_sided"),
        ("gloo", "one_sided", "cpu", True, "gloo has none that ranks share"),
        ("auto", "one_sided", "cpu", False, "gloo has none that ranks share"),
        ("auto", "one_sided", "cuda", True, "NCCL gives no access to it here"),
    ],
)
def test_a_transport_that_cannot_be(asked, shape, device, one_host, says):
    with pytest.raises(BackendUnavailable) as caught:
        pick_transport(asked, shape, device, one_host)
    assert says in str(caught.value) and str(caught.value).count("\n") == 0


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_say_what_their_modules_say(shape):
    for name, value in BACKENDS[shape].CAPABILITIES.items():
        assert getattr(SHAPES[shape], name) == value, name


def test_what_upstream_says_of_each_backend():
    """Columns of upstream's comparison, by the names for which they hold."""

    def those(**values) -> set[str]:
        return {n for n, k in KNOWN_BACKENDS.items() if all(getattr(k, key) == value for key, value in values.items())}

    batched = {"deepep_low_latency", "nixl_ep"}
    deepep = {"deepep_high_throughput", "deepep_low_latency", "deepep_v2"}
    assert those(format="BatchedExperts") == those(weights_applied_by="combine") == those(round_robin=True) == batched
    assert (
        those(default_max_num_batched_tokens=256) == those(fault_tolerance=True) == batched == set(ROUND_ROBIN_BACKENDS)
    )
    assert those(hidden_sizes=LOW_LATENCY_HIDDEN_SIZES) == batched
    assert those(combine_dtype="bfloat16") == those(package="deep_ep") == deepep
    assert those(hidden_bytes=512) == deepep - batched
    assert those(output_is_reduced=False) == {AG}
    assert those(in_vllm=False) == {"all_to_all", "two_hop"} and those(uneven_experts=True) == {
        AG,
        "all_to_all",
        "two_hop",
    }
    assert set(KNOWN_BACKENDS) - SEQUENCE_PARALLEL_BACKENDS == {"deepep_v2", "flashinfer_nvlink_two_sided"}
    assert those(cuda_graph=False) == {"deepep_high_throughput"}
    forwarding = {"deepep_high_throughput", "mori_high_throughput", "mori_low_latency"}
    assert those(across_nodes=KNOWN_BACKENDS["deepep_high_throughput"].across_nodes) == forwarding
    assert set(KNOWN_BACKENDS) - those(across_nodes="") == forwarding | {"deepep_v2"}
    assert all(known.shape in SHAPES and known.receives and known.source for known in KNOWN_BACKENDS.values())
    assert set(OLD_NAMES.values()) <= set(KNOWN_BACKENDS) and len(fields(select("naive", use_all2all=False))) == 4


@pytest.mark.parametrize(
    ("name", "hidden", "expected"),
    [  # `maybe_roundup_layer_hidden_size`
        ("deepep_high_throughput", 6144, 6144), ("deepep_high_throughput", 2880, 3072), ("deepep_v2", 8193, 8448),
        ("deepep_low_latency", 6144, 6144), ("nixl_ep", 2880, 3072), ("nixl_ep", 1, 2048), ("nixl_ep", 8192, 8192),
        (AG, 2880, 2880), ("mori_low_latency", 8193, 8193), ("flashinfer_nvlink_one_sided", 2880, 2880),
    ],
)  # fmt: skip
def test_hidden_sizes_upstream(name, hidden, expected):
    assert upstream_hidden_size(name, hidden) == expected


def test_a_hidden_size_that_low_latency_does_not_have():
    """A note here, where any size travels."""
    with pytest.raises(ConfigError, match="hidden_size 8193 is too large for nixl_ep upstream, its largest is 8192"):
        upstream_hidden_size("nixl_ep", 8193)
    flags, large = ParallelConfig(data_parallel_size=2, all2all_backend="nixl_ep"), replace(GLM_5_1, hidden_size=8193)
    assert [note for note in make_plan(flags, large).notes if note.startswith("fine here; hidden_size 8193")]


def test_quantisation_knows_the_same_names():
    """Its own table is by these names; old ones may be missing there."""
    assert set(KNOWN_BACKENDS) <= set(WHEN) <= {*AVAILABLE, "no_dp_ep"}
    assert when("deepep_low_latency", "fp8_group") == "before"
