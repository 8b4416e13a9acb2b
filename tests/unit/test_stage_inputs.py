"""What a stage cannot take is refused by name, never read otherwise: shapes, dtypes, ids; and any strides are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backend_cases import FIXED, backend
from layer_cases import Batch, differences, make_batch, make_config, make_layer, make_weights, oracle
from torch.utils._python_dispatch import TorchDispatchMode

from moe_course import quant
from moe_course.backends import BACKENDS
from moe_course.backends.traffic import destinations, owners
from moe_course.combine import sum_contributions, sum_of_owners, weigh_and_sum
from moe_course.comm.sim import run_threads
from moe_course.dispatch import Dispatched, permute_by_expert
from moe_course.errors import CheckpointError, ConfigError
from moe_course.expert_map import make_placement
from moe_course.experts import grouped_linear, local_experts, to_local
from moe_course.layer import MoELayer
from moe_course.router import grouped_topk, route
from moe_course.rows import padded_linear, row_invariance
from moe_course.stages import Stages

CONFIG = make_config(10, 4, 64, 32)
WEIGHTS = make_weights(CONFIG, torch.float32)
PLACEMENT = make_placement(2, 10)
BATCH = make_batch([3, 2], CONFIG, torch.float32, seed=1)
FIRST = torch.arange(3)
ROWS, ROUTING, IDS = BATCH.hidden_states[0], BATCH.topk_weights[0], BATCH.topk_ids[0]


def routed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return route(rows, WEIGHTS.gate, WEIGHTS.bias, CONFIG)


def experts(w13=WEIGHTS.w13, w2=WEIGHTS.w2, **changes) -> torch.Tensor:
    """Layout "rows", with changes."""
    return local_experts(replace(Dispatched(ROWS, None, IDS, ROUTING, None, "rows", None), **changes), w13, w2, None)


def padded(**changes) -> torch.Tensor:
    """Layout "padded", with changes: room for 4 rows of each expert."""
    counts = torch.tensor([0, 4, 1] + [2] * 7, dtype=torch.int32)
    changes = {"hidden_states": torch.zeros(10, 4, 64), "expert_num_tokens": counts} | changes
    return experts(topk_ids=IDS[:0], topk_weights=None, layout="padded", **changes)


# -- shapes ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "a batch of logits": (
        lambda: grouped_topk(torch.randn(2, 100, 64), 4),
        r"router_logits are \[2, 100, 64\].*flatten",
    ),
    "a bias elsewhere": (
        lambda: grouped_topk(torch.randn(2, 10), 4, e_score_correction_bias=WEIGHTS.bias.to("meta")),
        "e_score_correction_bias is on meta, router_logits on cpu",
    ),
    "one row of logits": (lambda: grouped_topk(torch.randn(64), 4), r"router_logits are \[64\], expected \[T, E\]"),
    "a batch to route": (lambda: routed(ROWS[None]), r"rows are \[1, 3, 64\].*flatten"),
    "one row to route": (lambda: routed(ROWS[0]), r"rows are \[64\].*expected \[n, in\]"),
    "narrow rows to route": (lambda: routed(ROWS[:, :32]), r"rows are \[3, 32\], the weight \[10, 64\]"),
    "a product of a batch": (lambda: padded_linear(ROWS[None], WEIGHTS.gate), r"rows are \[1, 3, 64\]"),
    "a product of two dtypes": (lambda: padded_linear(ROWS, WEIGHTS.gate.double()), "float32 on cpu, .* torch.float64"),
    "ids beyond the experts": (lambda: permute_by_expert(IDS, 3), "local_ids reach 9, 3 experts are here"),
    "a batch": (lambda: experts(hidden_states=ROWS[None]), r"hidden_states are \[1, 3, 64\]"),
    "one row": (lambda: experts(hidden_states=ROWS[0]), r"hidden_states are \[64\]"),
    "rows left over": (lambda: experts(topk_ids=IDS[:2], topk_weights=ROUTING[:2]), r"topk_ids \[2, 4\]"),
    "weights left over": (lambda: experts(topk_ids=IDS[:, :2]), r"topk_weights \[3, 4\]"),
    "weights in a line": (lambda: experts(topk_weights=ROUTING.flatten()), r"topk_weights \[12\]"),
    "routes of K": (lambda: experts(topk_weights=None, layout="routes"), r"expected \[M, H\], \[M, 1\]"),
    "narrow rows": (lambda: experts(hidden_states=ROWS[:, :32]), r"rows are \[3, 32\], w13"),
    "bf16 rows": (lambda: experts(hidden_states=ROWS.bfloat16()), "bfloat16 on cpu, w13 is torch.float32"),
    "one matrix": (lambda: experts(w13=WEIGHTS.w13[0]), r"w13 is \[64, 64\]"),
    "fewer w2": (lambda: experts(w2=WEIGHTS.w2[:3]), r"w2 \[3, 64, 32\]"),
    "another I": (lambda: experts(w2=WEIGHTS.w2[:, :, :16]), r"w2 \[10, 64, 16\]"),
    "w2 elsewhere": (lambda: experts(w2=WEIGHTS.w2.to("meta")), "w2 torch.float32 on meta"),
    "bf16 w2": (lambda: experts(w2=WEIGHTS.w2.bfloat16()), "w2 torch.bfloat16"),
    "counts above C": (lambda: padded(expert_num_tokens=torch.full((10,), 5)), "has 0 … 4 rows"),
    "counts below 0": (lambda: padded(expert_num_tokens=torch.full((10,), -1)), "has 0 … 4 rows"),
    "no counts": (lambda: padded(expert_num_tokens=None), "expert_num_tokens None"),
    "flat rows": (lambda: padded(hidden_states=torch.zeros(4, 64)), r"are \[4, 64\]"),
    "other experts": (lambda: padded(w13=WEIGHTS.w13[:9], w2=WEIGHTS.w2[:9]), "rows of 10 experts"),
    "flat contributions": (lambda: weigh_and_sum(ROWS, ROUTING, IDS.long()), r"contributions are \[3, 64\]"),
    "unsigned owners": (
        lambda: weigh_and_sum(torch.zeros(3, 4, 8), ROUTING, IDS.to(torch.uint8)),
        "owner is torch.uint8",
    ),
    "partial sums left over": (lambda: sum_of_owners([ROWS], FIRST[:2], 3), r"sums are \[\[3, 64\]\], rows \[2\]"),
    "fewer partial sums": (lambda: sum_of_owners([ROWS[:1], ROWS[:1]], FIRST, 3), r"are \[\[1, 64\], .*, rows \[3\]"),
    "no partial sums": (lambda: sum_of_owners([], FIRST[:0], 3), r"partial sums are \[\]"),
    "sums of a row beyond": (lambda: sum_of_owners([ROWS], FIRST, 2), "rows reach to 2, expected 0 … 1"),
    "sums of a row below": (
        lambda: sum_of_owners([ROWS], FIRST - 1, 3),
        "counted: .*non-negative.*; expected int64, 0 … 2",
    ),
    "sums of half a row": (
        lambda: sum_of_owners([ROWS], FIRST + 0.5, 3),
        "rows cannot be counted: .*; expected int64",
    ),
    "rows in columns": (lambda: sum_of_owners([ROWS], FIRST[:, None], 3), r"rows \[3, 1\]"),
    "one contribution broadcast": (lambda: sum_contributions([ROWS, ROWS[:1]]), "all of one shape and dtype"),
    "contributions of two dtypes": (lambda: sum_contributions([ROWS, ROWS.double()]), "all of one shape and dtype"),
    "no contributions": (lambda: sum_contributions([]), "contributions are none"),
    "experts in int32": (lambda: experts(WEIGHTS.w13.int(), WEIGHTS.w2.int(), hidden_states=ROWS.int()), "dequantise"),
    "an unsigned map": (lambda: to_local(IDS, torch.arange(10).to(torch.uint8), 10), "expert_map is .* torch.uint8"),
    "a map of two lines": (lambda: to_local(IDS, torch.arange(10).view(2, 5), 10), r"expert_map is \[2, 5\]"),
    "a group in another order": (lambda: make_placement(4, 8).within([3, 1]), r"EP ranks \[3, 1\] need to rise"),
    "a group given twice": (lambda: PLACEMENT.within((0, 0)), r"EP ranks \[0, 0\] need to rise"),
    "a group of strangers": (lambda: PLACEMENT.within([5]), r"EP ranks \[5\] need to rise, each once, from 0 to 1"),
    "one number to round": (lambda: quant.quantize(torch.tensor(1.0), "fp8_token"), r"fp8_token: rows are \[\]"),
    "empty rows to round": (lambda: quant.quantize(torch.zeros(2, 0), "int8_token"), r"rows are \[2, 0\]"),
    "fewer weights": (lambda: weigh_and_sum(torch.zeros(3, 4, 8), ROUTING[:, 1:], IDS.long()), r"weights \[3, 3\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name):
    """Each of these was computed otherwise, or ended in an error of torch's about an index."""
    assert padded().shape == (10, 4, 64) and experts().shape == (3, 64)
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(
    "stage",
    [
        lambda ids: permute_by_expert(ids, 10),
        lambda ids: to_local(ids, None, 10),
        lambda ids: owners(ids, PLACEMENT),
        lambda ids: destinations(ids, PLACEMENT),
        lambda ids: experts(topk_ids=ids),
    ],
    ids=["permute", "to_local", "owners", "destinations", "experts"],
)
def test_ids_are_lines_of_signed_numbers(stage, dtype):
    """In uint8 -1 becomes expert 255; a cut-off fraction is another expert. Every signed dtype gives the same."""
    with pytest.raises(ConfigError, match=f"ids are {dtype}, expected int32 or int64"):
        stage(IDS.to(dtype))
    for shape in (IDS[0], IDS[None]):
        with pytest.raises(ConfigError, match=r"ids are \[.*\], expected \[T, K\]"):
            stage(shape)
    for signed in (torch.int8, torch.int16, torch.int64):
        ours, theirs = stage(IDS.to(signed)), stage(IDS)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        assert all(torch.equal(a, b) for a, b in pairs)


LOPSIDED = {
    "rows of a batch": (lambda x, w, i: (x[None], w, i), r"hidden_states are \[1, 3, 64\]"),
    "one row": (lambda x, w, i: (x[0], w[:1], i[:1]), r"hidden_states are \[64\]"),
    "rows left over": (lambda x, w, i: (x, w[:1], i[:1]), r"topk_ids \[1, 4\]"),
    "ids left over": (lambda x, w, i: (x[:1], w, i), r"hidden_states are \[1, 64\]"),
    "weights left over": (lambda x, w, i: (x, w, i[:, :2]), r"topk_ids \[3, 2\]"),
    "fewer weights": (lambda x, w, i: (x, w[:, :2], i), r"topk_weights \[3, 2\]"),
    "weights in a line": (lambda x, w, i: (x, w[:, 0], i), r"topk_weights \[3\]"),
    "unsigned ids": (lambda x, w, i: (x, w, i.to(torch.uint8)), "topk_ids are torch.uint8"),
    "fractions for ids": (lambda x, w, i: (x, w, i + 0.7), "topk_ids are torch.float32"),
    "weights elsewhere": (lambda x, w, i: (x, w.to("meta"), i), "topk_weights on meta"),
    "ids elsewhere": (lambda x, w, i: (x, w, i.to("meta")), "topk_ids on meta"),
    "rows of rows": (lambda x, w, i: (x[:, None], w, i), r"hidden_states are \[3, 1, 64\]"),
}


@pytest.mark.parametrize("case", LOPSIDED)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_dispatch_leaves_rows_behind(name, case):
    """Fewer ids than rows lost the rows that are over, silently, in most backends. In a layer, and without one."""
    change, words = LOPSIDED[case]
    module = backend(name, max_num_tokens=4 if name in FIXED else None)

    def fn(comm, alone):
        parts = change(*(part[comm.rank] for part in (BATCH.hidden_states, BATCH.topk_weights, BATCH.topk_ids)))
        if alone:
            module.dispatch(*parts, comm=comm, placement=PLACEMENT)
        else:
            make_layer(WEIGHTS, PLACEMENT, comm, module).routed(*parts)

    for alone in (False, True):
        with pytest.raises(ConfigError, match=f"rank 0: .*{words}"):
            run_threads(2, fn, alone)


@pytest.mark.parametrize("case", LOPSIDED)
def test_the_layer_looks_before_a_dispatch_of_your_own(case):
    """Which need not look at all."""
    change, words = LOPSIDED[case]

    def fn(comm):
        layer = make_layer(
            WEIGHTS, make_placement(1, 10), comm, backend("no_dp_ep"), stages=Stages(dispatch=pytest.fail)
        )
        layer.routed(*change(ROWS, ROUTING, IDS))

    with pytest.raises(ConfigError, match=f"rank 0: .*{words}"):
        run_threads(1, fn)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(2, 3, 64), r"rank 0, layer 5: hidden_states are \[2, 3, 64\], expected \[T, 64\]; flatten them"),
        (torch.zeros(64), r"hidden_states are \[64\]"),
        (torch.zeros(3, 32), r"hidden_states are \[3, 32\]"),
        (torch.zeros(3, 64, dtype=torch.bfloat16), "are torch.bfloat16 on cpu, the experts torch.float32 on cpu"),
        (torch.zeros(3, 64, device="meta"), "are torch.float32 on meta, the experts torch.float32 on cpu"),
    ],
    ids=["batch", "one row", "narrow", "bf16", "elsewhere"],
)
def test_the_layer_takes_rows_and_nothing_else(rows, words):
    def fn(comm):
        make_layer(WEIGHTS, make_placement(1, 10), comm, backend("no_dp_ep"), layer=5)(rows)

    with pytest.raises(ConfigError, match=words):
        run_threads(1, fn)


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("shared w2", torch.bfloat16, "rank 0: w13 is torch.float32, shared w2 is torch.bfloat16"),
        ("w2", torch.bfloat16, "rank 0: w13 is torch.float32, w2 is torch.bfloat16"),
        ("gate_weight", "meta", "rank 0: gate_weight is on meta, w13 on cpu; bring"),
        ("bias", "meta", "rank 0: bias is on meta, w13 on cpu"),
        ("w2", "meta", "rank 0: w2 is on meta, w13 on cpu"),
        ("shared w13", "meta", "rank 0: shared w13 is on meta, w13 on cpu"),
    ],
)
def test_weights_of_a_layer_are_of_one_dtype_and_on_one_device(name, how, words):
    """Refused where the layer is made, and not in the middle of its first pass, behind an exchange."""

    def fn(comm):
        weights = {"gate_weight": WEIGHTS.gate, "bias": WEIGHTS.bias, "w13": WEIGHTS.w13, "w2": WEIGHTS.w2}
        weights |= {"shared w13": WEIGHTS.shared[0], "shared w2": WEIGHTS.shared[1]}
        weights[name] = weights[name].to(how)
        shared = (weights.pop("shared w13"), weights.pop("shared w2"))
        MoELayer(CONFIG, make_placement(1, 10), comm, backend("no_dp_ep"), shared=shared, **weights)

    with pytest.raises(ConfigError, match=words):
        run_threads(1, fn)


def test_a_shared_expert_of_one_number_is_no_matrix():
    with pytest.raises(CheckpointError, match=r"rank 0: shared w13 has shape \(64, 64\), expected \(0, 64\)"):
        run_threads(1, lambda comm: MoELayer(
            CONFIG, make_placement(1, 10), comm, backend("no_dp_ep"), gate_weight=WEIGHTS.gate, bias=WEIGHTS.bias,
            w13=WEIGHTS.w13, w2=WEIGHTS.w2, shared=(WEIGHTS.shared[0], torch.tensor(1.0)),
        ))  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
def test_traffic_is_worked_out_from_the_ids_of_every_rank(name):
    for ranks in (1, 3):
        with pytest.raises(ConfigError, match=f"topk_ids of {ranks} ranks for a placement over 2; give one tensor"):
            BACKENDS[name].traffic([IDS] * ranks, PLACEMENT)
    given, lazy = (BACKENDS[name].traffic(ids, PLACEMENT) for ids in ([IDS, IDS[:1]], iter([IDS, IDS[:1]])))
    assert torch.equal(lazy.dispatch, given.dispatch) and torch.equal(lazy.combine, given.combine)
    for ids in (IDS[0], IDS.to(torch.uint8)):
        with pytest.raises(ConfigError, match="rank 1: topk_ids are"):
            BACKENDS[name].traffic([IDS, ids], PLACEMENT)


class Looks(TorchDispatchMode):
    """Counts how often a number is read out of a tensor. On a GPU each time waits for all that was asked before."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_adding_up_the_owners_looks_at_one_number():
    """At how many partial sums a row has at most. That all rows are in place is known without another look."""
    with Looks() as looks:
        sum_of_owners([ROWS, ROWS], torch.cat([FIRST, FIRST]), 3)
    assert looks.seen == 1


# -- strides ---------------------------------------------------------------------------------------------------------


def wide(tensor: torch.Tensor, more: int) -> torch.Tensor:
    """The same numbers with `more` others behind each line."""
    return torch.cat([tensor, tensor[..., :1].expand(*tensor.shape[:-1], more)], dim=-1)[..., : tensor.shape[-1]]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """One number between each expert's matrix and the next."""
    e, rows, columns = tensor.shape
    flat = tensor.new_zeros(e * (rows * columns + 1))
    view = flat.as_strided((e, rows, columns), (rows * columns + 1, columns, 1))
    return view.copy_(tensor)


STRIDES = {
    "one number wider": lambda w: wide(w, 1),
    "16 bytes wider": lambda w: wide(w, 16 // w.element_size()),
    "stored [E, in, out]": turned,
    "every second number": lambda w: torch.stack([w, -w], dim=-1)[..., 0],
    "a number between experts": apart,
    "expanded": lambda w: w[..., :1, :].expand_as(w),
    "one matrix for all": lambda w: w[:1].expand_as(w),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("inter", [32, 7])
@pytest.mark.parametrize("name", STRIDES)
def test_any_strides_of_the_weights(name, inter, dtype):
    """The layer with strided matrices is the slow reference with contiguous ones, to the bit where that is promised."""
    weights = make_weights(make_config(6, 3, 64, inter), dtype)
    placement, batch = make_placement(1, 6), make_batch([7], weights.config, dtype, seed=3)
    strided = {"w13": STRIDES[name](weights.w13), "w2": STRIDES[name](weights.w2)}
    assert not strided["w13"].is_contiguous()
    weights = replace(weights, **{which: matrix.clone() for which, matrix in strided.items()})

    def fn(comm):
        layer = make_layer(weights, placement, comm, backend("no_dp_ep"), shared=False, **strided)
        parts = (part[0] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids))
        return layer.routed(*parts), layer.row_invariance()

    ((output, verdict),) = run_threads(1, fn)
    assert not differences([output], oracle(batch, weights, placement, shared=False), verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strides", [*STRIDES, "contiguous"])
@pytest.mark.parametrize("width", [32, 24, 7])
def test_the_kernel_and_what_stands_in_for_it_are_one_function(width, strides, dtype):
    """Strided rows, too: `grouped_mm` where it takes the strides, a product per expert elsewhere."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 40, width, generator=generator).to(dtype)
    rows = torch.randn(96, width, generator=generator).to(dtype)
    ends = torch.tensor([32, 32, 96])
    laid = STRIDES.get(strides, lambda w: w)(weight)
    verdict = row_invariance([(width, 40)], dtype, rows.device)
    for given in (rows, wide(rows, 1), rows.T.contiguous().T, rows[:1].expand_as(rows), rows[:, :1].expand_as(rows)):
        plain, matrices = given.clone(), laid.clone()
        expected = torch.cat([F.linear(plain[:32], matrices[0]), F.linear(plain[32:], matrices[2])])
        assert not differences([grouped_linear(given, laid, ends)], [expected], verdict)


def test_a_rank_without_experts_computes_nothing():
    """Rows of others may come by; no layout ends in an index error."""
    none, nowhere = {"w13": WEIGHTS.w13[:0], "w2": WEIGHTS.w2[:0]}, torch.full((10,), -1, dtype=torch.int32)
    sent = Dispatched(ROWS, None, IDS, ROUTING, None, "rows", None)
    routes = replace(sent, topk_ids=IDS[:, :1], topk_weights=None, layout="routes")
    for came in (sent, routes):
        output = local_experts(came, **none, expert_map=nowhere)
        assert output.shape == (3, 64) and not output.any()
    counts = torch.zeros(0, dtype=torch.int32)
    assert padded(hidden_states=torch.zeros(0, 4, 64), expert_num_tokens=counts, **none).shape == (0, 4, 64)


def test_a_batch_of_the_layer_by_its_rows():
    """The cure that the error names gives the rows of the batch."""
    batch = Batch([torch.cat([ROWS, ROWS])], [torch.cat([ROUTING] * 2)], [torch.cat([IDS] * 2)])
    stacked = torch.stack([ROWS, ROWS])

    def fn(comm):
        layer = make_layer(WEIGHTS, make_placement(1, 10), comm, backend("no_dp_ep"))
        return layer(stacked.reshape(-1, 64)), layer(batch.hidden_states[0])

    ((ours, theirs),) = run_threads(1, fn)
    assert torch.equal(ours, theirs)
