"""Every step program, compiled for an H200 on a machine without a GPU: XLA, Triton, Mosaic and
ptxas take it, it writes pages in place, and its temporaries are as small as sizing assumes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm.engine.startup.measure import LEAST_LAYERS, at_depth
from jaxllm.models import make_spec
from jaxllm.nn.mlp import is_fused
from pallas_kernels.grouped_matmul import tile_for
from pallas_kernels.grouped_matmul.groups import tiles_of
from pallas_kernels.grouped_matmul.plan import ONE_LAUNCH
from tests.engine.runtime.h200 import SLOTS, TOKENS, Compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

MIB = 2**20
SCORED = 256  # prompt tokens whose log-probabilities are computed at once
FORWARDS = ("decode", "extend")
OTHERS = (
    "prompt_logprobs",
    "process_logits",
    "logprobs",
    "set_slot",
    "apply_token_bitmask",
    "update_slots",
    "copy_pages",
    "save_pages",
    "load_pages",
)
ENDS = [0, -1]  # the smallest and the largest program of a kind
DEEP = 12  # layers
MODELS = ["llama-3.1-8b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-30b-a3b"]
# Qwen2.5 has groups of seven and biases, Qwen3 norms of heads, as the embedding model has
FAST = [
    ("llama-3.1-8b", "decode", -1),
    ("llama-3.1-8b", "extend", -1),
    ("llama-3.1-8b", "sample", -1),
    ("qwen2.5-7b", "decode", -1),
]
KERNELS = {"decode": 10, "extend": 7}  # launches of own kernels in two layers
LIMITS = {"decode": 64 * MIB, "sample": MIB}


def most_bytes(model: str) -> int:
    """What the largest step of plain weights may hold.

    A forward holds four residual streams of its tokens, five where it has experts, and the product
    of gate and up; both products, beside five streams, where no kernel makes that of both at once.
    Prompt log-probabilities hold float32 logits of the scored tokens, and a quarter more.
    """
    spec = make_spec(ALWAYS | SHAPES[model])
    width = (4 if spec.mixture is None else 5) * spec.width + spec.inner_width
    if not is_fused(spec.activation):
        width = 5 * spec.width + 2 * spec.inner_width
    return max((TOKENS + SLOTS) * width * 2, SCORED * spec.vocab_size * 5)


def check(model: str, reports: list[dict[str, Any]], limit: int | None = None) -> None:
    """Every program was taken, keeps its donated buffers, copies no pages, computes nothing twice
    to save memory, and needs at most `limit` bytes beside its arguments, by default what the
    largest step may hold."""
    limit = limit or most_bytes(model)
    assert reports
    for report in reports:
        assert report["refused"] is None, report
        assert report["not_aliased"] == [], report
        assert report["copies"] == [], report
        assert report["computed_again"] == 0, report
        assert report["needed_bytes"] <= limit, report


@pytest.mark.parametrize(
    ("model", "kind", "place"),
    [
        pytest.param(*each, marks=[] if each in FAST else pytest.mark.slow)
        for each in itertools.product(MODELS, [*FORWARDS, "sample"], ENDS)
    ],
)
def test_a_forward_or_a_draw_compiles_and_writes_pages_in_place(
    model: str, kind: str, place: int, compiler: Compiler
) -> None:
    reports = compiler.reports(model=model, kind=kind, places=[place])
    check(model, reports, LIMITS.get(kind))
    # A CUDA graph would be recorded anew for memory of the host, which lies elsewhere at each step
    reads = ["copy-start"] if kind == "extend" else []
    assert [report["host_reads"] for report in reports] == [reads]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "wish"),
    [
        ("qwen2.5-7b", None),
        ("qwen2.5-7b", "fp8"),
        ("qwen2.5-7b", "int4"),
        ("qwen2.5-7b", "int8"),
        ("gemma2-9b", None),
        ("phi3-mini", None),
        ("qwen3-30b-a3b", None),
        ("qwen3-30b-a3b", "fp8"),
        ("deepseek-v2-lite", None),
        ("gpt-oss-20b", None),
    ],
)
def test_forwards_of_few_layers_tell_the_need_of_a_deep_one(
    model: str, wish: str | None, compiler: Compiler
) -> None:
    depths = (LEAST_LAYERS, 2 * LEAST_LAYERS)
    few, more, deep = (
        report["needed_bytes"]
        for layers in (*depths, DEEP)
        for report in compiler.reports(
            model=model, kind="extend", places=[-1], layers=layers, quantization=wish
        )
    )
    told = at_depth(depths, (few, more), DEEP)
    assert deep <= told <= deep * 1.02 + MIB, (few, more, deep)


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), -1])
@pytest.mark.slow
def test_a_forward_of_an_embedding_model_compiles_and_writes_pages_in_place(
    place: int, compiler: Compiler
) -> None:
    check("qwen3-0.6b", compiler.reports(model="qwen3-0.6b", kind="pool", places=[place]))


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), -1])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("bge-base-en-v1.5", marks=pytest.mark.slow),
        pytest.param("bge-m3", marks=pytest.mark.slow),
        "modernbert-base",
    ],
)
def test_a_forward_of_an_encoder_compiles_and_holds_no_scores_of_all_pairs(
    model: str, place: int, compiler: Compiler
) -> None:
    # Of ModernBERT's two layers one attends to everything, the other to a window
    check(model, compiler.reports(model=model, kind="encode", places=[place], layers=2), 512 * MIB)


def test_a_step_writes_no_weights_side_by_side(compiler: Compiler) -> None:
    # XLA would merge the products of a latent's queries and of its down projection
    (report,) = compiler.reports(model="deepseek-v2-lite", kind="decode", places=[-1])
    assert report["joined"] == []


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), -1])
@pytest.mark.parametrize("kind", [pytest.param("decode", marks=pytest.mark.slow), "extend"])
@pytest.mark.slow
def test_a_forward_over_latents_compiles_and_writes_pages_in_place(
    kind: str, place: int, compiler: Compiler
) -> None:
    # Layers are dense, then a mixture
    model = "deepseek-v2-lite"
    reports = compiler.reports(model=model, kind=kind, places=[place])
    check(model, reports, LIMITS.get(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("model", ["gemma2-9b", "phi3-mini", "llama-3.2-1b"])
def test_forwards_of_other_families_compile_and_write_pages_in_place(
    model: str, kind: str, compiler: Compiler
) -> None:
    # Gemma's gate and up are not one kernel, so its extend holds both products
    check(model, compiler.reports(model=model, kind=kind, places=[-1]), LIMITS.get(kind))


@pytest.mark.parametrize("kind", ["decode", pytest.param("extend", marks=pytest.mark.slow)])
def test_a_forward_over_8_bit_pages_compiles_and_writes_them_in_place(
    kind: str, compiler: Compiler
) -> None:
    reports = compiler.reports(
        model="llama-3.1-8b", kind=kind, places=[-1], kv_dtype="float8_e4m3fn"
    )
    check("llama-3.1-8b", reports, LIMITS.get(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize(
    ("wish", "call"),
    [("fp8", "__cublas$lt$matmul$f8"), ("int8", "__cublas$lt$matmul")],
)
def test_products_of_8_bits_are_cublas_own(
    wish: str, call: str, kind: str, compiler: Compiler
) -> None:
    (report,) = compiler.reports(model="llama-3.1-8b", kind=kind, places=[-1], quantization=wish)
    assert report["refused"] is None and report["copies"] == report["not_aliased"] == []
    # Four products a layer, and the head's in 16 bits
    head = call == "__cublas$lt$matmul"
    assert report["calls"][call] == 2 * 4 + head, report["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["fp8", "int8", "fp8_w8a16", "int8_w8a16"])
def test_products_of_few_rows_in_8_bits_are_the_kernels(wish: str, compiler: Compiler) -> None:
    given = {"model": "llama-3.1-8b", "kind": "decode", "places": [0]}
    (plain,) = compiler.reports(**given)
    (report,) = compiler.reports(**given, quantization=wish)
    check("llama-3.1-8b", [report], LIMITS["decode"])
    (down,) = (plain["kernels"][name] for name in plain["kernels"] if "plain_matmul" in name)
    assert down == 2
    added = report["calls"]["mosaic_gpu_v2"] - plain["calls"]["mosaic_gpu_v2"] + down
    # Norms that add round what follows; others are the embedding's and those before o and down
    roundings = 1 + 2 * 2
    assert added == 2 * 4 + (roundings if wish == "fp8" else 0)
    assert not any("cublas" in call for call in report["calls"])


@pytest.mark.slow
def test_both_products_of_experts_are_one_launch_where_that_is_faster(compiler: Compiler) -> None:
    reports = compiler.reports(model="qwen3-30b-a3b", kind="decode")
    check("qwen3-30b-a3b", reports)
    for report in reports:
        rows = int(report["name"].split("-")[1])
        once = any(name.startswith("grouped_feed_forward_") for name in report["kernels"])
        twice = any(name.startswith("grouped_matmul_") for name in report["kernels"])
        assert (once, twice) == (rows in ONE_LAUNCH, rows not in ONE_LAUNCH), report["name"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize(
    ("model", "wish", "kernel"),
    [
        ("qwen3-30b-a3b", "fp8", "grouped_scaled_"),
        ("qwen3-30b-a3b", "int8", "grouped_scaled_"),
        ("qwen3-30b-a3b", "fp8_w8a16", "grouped_fp8_w8a16_"),
        ("qwen3-30b-a3b", "int8_w8a16", "grouped_int8_w8a16_"),
        ("gpt-oss-20b", None, "grouped_int4_"),
        ("gpt-oss-120b", None, "grouped_int4_"),
    ],
)
def test_products_of_experts_in_few_bits_are_one_kernel_each(
    model: str, wish: str | None, kernel: str, kind: str, compiler: Compiler
) -> None:
    reports = compiler.reports(model=model, kind=kind, places=[-1], quantization=wish)
    # The start measures this, so it need not be expected: 128 experts fill many tiles in part
    check(model, reports, 1024 * MIB)
    calls = reports[0]["kernels"]
    assert sum(calls[name] for name in calls if name.startswith(kernel)) == 4, calls  # two layers


@pytest.mark.parametrize("kind", OTHERS)
def test_what_runs_beside_forwards_compiles_and_keeps_its_buffers(
    kind: str, compiler: Compiler
) -> None:
    # Log-probabilities of a prompt's chunk hold its logits, the others no more than pages that move
    reports = compiler.reports(model="llama-3.1-8b", kind=kind, places=[-1])
    check("llama-3.1-8b", reports, None if kind == "prompt_logprobs" else 64 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kind"),
    [(0, "advance"), (1, "sample"), *itertools.product((0, 1), (*FORWARDS, "copy_pages"))],
)
def test_programs_of_a_stage_compile_and_write_pages_in_place(
    number: int, kind: str, compiler: Compiler
) -> None:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "kind": kind, "places": [-1], "layers": 4}
    check("llama-3.1-8b", compiler.reports(**given, stage=(number, 2)), LIMITS.get(kind))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) for kind in (*FORWARDS, "sample", *OTHERS)],
)
def test_programs_of_two_gpus_compile_and_keep_their_buffers(kind: str, compiler: Compiler) -> None:
    # Whole rows of logits are copied where a draw needs them
    (report,) = compiler.reports(model="llama-3.1-8b", kind=kind, places=[-1], devices=2)
    roomy = ("extend", "sample", "prompt_logprobs")
    check("llama-3.1-8b", [report], None if kind in roomy else 64 * MIB)
    if kind in FORWARDS:  # attention's and the feed-forward's in each of two layers
        assert report["collectives"] == {"all-reduce": 4}
        assert report["calls"]["mosaic_gpu_v2"] == KERNELS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize(
    ("model", "sums"),
    [
        ("qwen3-0.6b", 5),  # a table that is also the head is split, so its lookup is a sum
        ("qwen3-30b-a3b", 4),
        ("deepseek-v2-lite", 4),
    ],
)
def test_forwards_over_two_gpus_sum_twice_a_layer(
    model: str, sums: int, kind: str, compiler: Compiler
) -> None:
    (report,) = compiler.reports(model=model, kind=kind, places=[-1], devices=2)
    check(model, [report], 640 * MIB)
    assert report["collectives"] == {"all-reduce": sums}


def rows_bytes(model: str, shards: int) -> int:
    """What the largest forward over several GPUs holds of a mixture: the rows of all choices in
    their tiles, before and between both products of this GPU's experts, of which it has one share
    of `shards`; and the residual stream with a sum yet to be added."""
    spec, tokens = make_spec(ALWAYS | SHAPES[model]), TOKENS + SLOTS
    assert spec.mixture is not None
    experts, choices = spec.mixture.experts, spec.mixture.choices
    tile = tile_for(tokens, choices, experts)
    rows = tiles_of(tokens, choices, experts, tile) * tile
    each = spec.width + spec.mixture.inner // shards
    return 2 * (rows * each + 2 * tokens * spec.width)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize(
    ("model", "devices", "groups", "kernel"),
    [
        ("qwen3-30b-a3b", 2, 2, "grouped_matmul"),
        ("qwen3-30b-a3b", 4, 2, "grouped_matmul"),
        ("gpt-oss-20b", 2, 2, "grouped_int4_"),
    ],
)
def test_experts_of_their_own_cost_gpus_no_further_sum(
    model: str, devices: int, groups: int, kernel: str, kind: str, compiler: Compiler
) -> None:
    (report,) = compiler.reports(
        model=model, kind=kind, places=[-1], devices=devices, groups=groups
    )
    # A group has rows for every choice, since tokens may choose its experts alone
    rows = rows_bytes(model, devices // groups)
    check(model, [report], LIMITS.get(kind, rows + 16 * MIB))
    assert report["collectives"] == {"all-reduce": 4}
    calls = report["kernels"]
    assert sum(calls[name] for name in calls if name.startswith(kernel)) == 4, calls


@pytest.mark.slow
def test_a_greedy_token_is_one_swap_between_two_gpus(compiler: Compiler) -> None:
    reports = compiler.reports(model="llama-3.1-8b", kind="sample", devices=2)
    greedy = [report for report in reports if report["name"].split("-")[2] == "0"]
    assert greedy and all(report["collectives"] == {"all-gather": 1} for report in greedy)


@pytest.mark.parametrize(
    ("kind", "place", "devices"),
    [
        pytest.param(*each, marks=[] if each == ("decode", -1, 2) else pytest.mark.slow)
        for each in [
            *itertools.product(FORWARDS, ENDS, (2, 8)),
            ("sample", -2, 2),  # greedy draws of the most rows
        ]
    ],
)
def test_gpus_that_reach_each_other_need_no_collectives(
    kind: str, place: int, devices: int, compiler: Compiler
) -> None:
    reports = compiler.reports(
        model="llama-3.1-8b", kind=kind, places=[place], devices=devices, peers=True
    )
    check("llama-3.1-8b", reports, 64 * MIB if kind == "decode" else None)
    for report in reports:
        assert report["collectives"] == {}, report
        # A kernel for each of two sums of two layers, or for the swap of the best tokens
        assert report["calls"]["mosaic_gpu_v2"] >= (4 if kind in FORWARDS else 1), report


def test_a_pool_that_is_not_donated_is_found(compiler: Compiler) -> None:
    (report,) = compiler.reports(model="qwen3-0.6b", kind="decode", places=[0], donating=False)
    assert len(report["copies"]) == 2  # keys and values
    assert report["not_aliased"]
    assert report["needed_bytes"] > 2**30
    with pytest.raises(AssertionError):
        check("qwen3-0.6b", [report])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [*FORWARDS, "sample", *OTHERS])
def test_every_program_of_the_lattice_compiles(model: str, kind: str, compiler: Compiler) -> None:
    check(model, compiler.reports(model=model, kind=kind))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_of_the_whole_model_compiles(model: str, kind: str, compiler: Compiler) -> None:
    check(model, compiler.reports(model=model, kind=kind, places=ENDS, layers=None))
