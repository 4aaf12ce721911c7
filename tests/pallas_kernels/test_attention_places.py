"""The Hopper kernels of both attention ops in the interpreter and on a card, against the reference
over the same rounded inputs; what no row may see is NaN, and so are outputs before the call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_cases
from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as hopper_decode
from pallas_kernels.paged_decode.cases import Case as Decode
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.paged_extend import mosaic_gpu as hopper_extend
from pallas_kernels.paged_extend.cases import Case as Extend
from pallas_kernels.quantised import SCALE_DTYPE, quantise
from tests.pallas_kernels.places import (
    CARD,
    INTERPRETER,
    card,
    jitted,
    launch_options,
    pick,
    poison_outputs,
    relative_error,
    shape_of,
    slow_places,
)

TOLERANCE = 5e-3
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
quiet = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered:RuntimeWarning",
)
# Each takes all options; those of 8-bit pages are apart
DECODE_VARIANTS = {
    "flags": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1),
    "clusters of 1": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1, cluster=1),
    "clusters of 2": hopper_decode.Tuning(stages=2, blocks=12, min_tiles=1, cluster=2),
    "keys for rows": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1, cluster=1, swapped=True),
    "clusters of 2, keys for rows": hopper_decode.Tuning(
        stages=2, blocks=12, min_tiles=1, cluster=2, swapped=True
    ),
    "clusters of 8, keys for rows": hopper_decode.Tuning(
        stages=2, min_tiles=1, cluster=8, swapped=True
    ),
}
NARROW_VARIANTS = {
    "one consumer": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1),
    "two consumers": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1, consumers=2),
    "clusters of 1": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1, cluster=1, consumers=2),
    "clusters of 2": hopper_decode.Tuning(stages=2, blocks=12, min_tiles=1, cluster=2),
}
EXTEND_VARIANTS = {
    "two groups": hopper_extend.Tuning(blocks=8, min_tiles=1),
    "one group": hopper_extend.Tuning(groups=1, blocks=8, min_tiles=1),
    "heads apart": hopper_extend.Tuning(groups=1, blocks=8, min_tiles=1, shared_up_to=0),
}
SUPPORTED_DECODE = [
    c
    for c in decode_cases.CASES
    if c.head_dim in (64, 96, 128, 256) and c.page_size in (16, 32, 64, 128)
]
SUPPORTED_EXTEND = [
    c
    for c in extend_cases.CASES
    if c.head_dim in (64, 96, 128, 256) and c.page_size in (16, 32, 64, 128)
]
SMALL_DECODE = Decode(
    name="small", lengths=(130, 0, 5), heads=4, kv_heads=2, page_size=64, sinks=True
)
SMALL_EXTEND = Extend(
    name="small", rows=((100, 20), (0, 0), (3, 5)), gap=2, heads=2, kv_heads=1, page_size=64
)


def in_bytes(case: Any) -> bool:
    """Whether the kernels take the case over 8-bit pages."""
    return case.page_size in (64, 128) and case.head_dim != 96


def in_type(given: Any, dtype: str) -> list[jax.Array]:
    """The arguments of a case, floats in one type."""
    return [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in given.args]


def in_8_bits(args: list[jax.Array], kv_dtype: str) -> tuple[list[jax.Array], jax.Array]:
    """Arguments with pages of 8 bits, and their scales; NaN stays NaN in all three."""
    q, k, v, *rest = args
    pairs = [quantise(x.astype(jnp.float32), kv_dtype) for x in (k, v)]
    hidden = jnp.isnan(k[..., 0])[:, :, None]
    scales = jnp.where(hidden, jnp.nan, jnp.stack([scale for _, scale in pairs], axis=2))
    return [q, pairs[0][0], pairs[1][0], *rest], scales.astype(SCALE_DTYPE)


def wide(x: jax.Array) -> jax.Array:
    """Float32 of 16-bit floats, which the reference computes with."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def error(
    op: str, place: str, case: Any, tuning: Any, dtype: str, kv_dtype: str | None, seed: int = 0
) -> float:
    """Relative error of the kernel against the reference."""
    cases, package, hopper = (
        (decode_cases, paged_decode.decode_attention, hopper_decode.decode_attention)
        if op == "decode"
        else (extend_cases, paged_extend.extend_attention, hopper_extend.extend_attention)
    )
    args, more = in_type(cases.inputs(case, seed), dtype), {}
    if kv_dtype is not None:
        args, more["scales"] = in_8_bits(args, kv_dtype)
    poison_outputs(place, shape_of(args[0]))
    how = {
        **case.options,
        **launch_options(place),
        **({} if tuning is None else {"tuning": tuning}),
    }
    out = jax.jit(functools.partial(hopper, **how))(*args, **more)
    assert out.dtype == dtype and out.shape == args[0].shape
    reference = functools.partial(package, backend="reference", **case.options)
    wanted = jax.jit(reference)(*map(wide, args[:1]), *args[1:3], *args[3:], **more)
    if kv_dtype is None:
        wanted = jax.jit(reference)(*map(wide, args))
    return relative_error(out, wanted)


@quiet
@pytest.mark.parametrize(
    ("place", "variant"),
    [
        # Those that test_mosaic_decode.py runs by default are slow here too
        pytest.param(INTERPRETER, name, marks=pytest.mark.slow)
        for name in DECODE_VARIANTS
        if name != "clusters of 8, keys for rows"
    ]
    + [pytest.param(CARD, name, marks=pytest.mark.gpu) for name in DECODE_VARIANTS],
)
def test_every_version_of_decode_equals_the_reference(place: str, variant: str) -> None:
    tuning = DECODE_VARIANTS[variant]
    for case in pick(place, [SMALL_DECODE], SUPPORTED_DECODE):
        for dtype in pick(place, ("bfloat16",), ("bfloat16", "float16")):
            found = error("decode", place, case, tuning, dtype, None)
            assert found < TOLERANCE, (case.name, dtype)


@quiet
@slow_places
@pytest.mark.parametrize("variant", NARROW_VARIANTS)
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_decode_over_8_bit_pages_equals_the_reference(
    place: str, variant: str, kv_dtype: str
) -> None:
    found = [case for case in SUPPORTED_DECODE if in_bytes(case)]
    for case in pick(place, [SMALL_DECODE], found):
        tuning = NARROW_VARIANTS[variant]
        assert error("decode", place, case, tuning, "bfloat16", kv_dtype) < TOLERANCE, case.name


@quiet
@slow_places
@pytest.mark.parametrize("variant", EXTEND_VARIANTS)
def test_every_version_of_extend_equals_the_reference(place: str, variant: str) -> None:
    for case in pick(place, [SMALL_EXTEND], SUPPORTED_EXTEND):
        for dtype in pick(place, ("float16",), ("bfloat16", "float16")):
            found = error("extend", place, case, EXTEND_VARIANTS[variant], dtype, None)
            assert found < TOLERANCE, (case.name, dtype)


@quiet
@slow_places
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_extend_over_8_bit_pages_equals_the_reference(place: str, kv_dtype: str) -> None:
    found = [case for case in SUPPORTED_EXTEND if in_bytes(case)]
    tuning = hopper_extend.Tuning(groups=1, stages=2, blocks=8, min_tiles=1)
    for case in pick(place, [SMALL_EXTEND], found):
        assert error("extend", place, case, tuning, "bfloat16", kv_dtype) < TOLERANCE, case.name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [(96, None), *((dim, kind) for dim in (64, 128, 256) for kind in (None, *EIGHT_BITS))],
)
@pytest.mark.parametrize("group", [1, 4, 7, 8, 9, 16, 24, 64, 71])
def test_the_tuned_sizes_decode_ragged_batches_of_several_seeds(
    head_dim: int, kv_dtype: str | None, group: int
) -> None:
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(0, 3000, 17)
        case = Decode(
            name="ragged",
            lengths=tuple(map(int, lengths)),
            heads=2 * group,
            kv_heads=2,
            head_dim=head_dim,
            page_size=64,
            window=(None, 700, 64)[seed],
            softcap=(None, 30.0, None)[seed],
            sinks=seed == 2,
        )
        assert error("decode", CARD, case, None, "bfloat16", kv_dtype, seed) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_clusters_over_8_bit_pages_decode_ragged_batches(cluster: int, kv_dtype: str) -> None:
    for seed, (rows, group) in enumerate(((1, 7), (16, 7), (40, 4))):
        lengths = np.random.default_rng(seed).integers(0, 3000, rows)
        case = Decode(
            name="ragged",
            lengths=tuple(map(int, lengths)),
            heads=4 * group,
            kv_heads=4,
            head_dim=128,
            page_size=64,
            window=(None, 700, None)[seed],
            softcap=(None, 30.0, None)[seed],
            sinks=seed == 2,
        )
        tuning = hopper_decode.default_tuning(128, 1)._replace(cluster=cluster)
        assert error("decode", CARD, case, tuning, "bfloat16", kv_dtype, seed) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 64, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("head_dim", "softcap"), [(128, None), (256, 50.0)])
def test_the_tuned_sizes_of_every_number_of_rows_and_heads_are_right(
    rows: int, kv_heads: int, kv_dtype: str | None, head_dim: int, softcap: float | None
) -> None:
    lengths = np.random.default_rng(rows).integers(1, 1200 if rows > 9 else 5000, rows)
    case = Decode(
        name="sizes",
        lengths=tuple(map(int, lengths)),
        heads=4 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=64,
        softcap=softcap,
    )
    assert error("decode", CARD, case, None, "bfloat16", kv_dtype) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [(dim, sizes) for dim in (96, 256) for sizes in kernel_cases.decode_tunings(2, dim)],
    ids=str,
)
def test_every_candidate_of_a_sweep_is_right(head_dim: int, sizes: hopper_decode.Tuning) -> None:
    for seed, (rows, group) in enumerate(((1, 2), (16, 1), (64, 2), (9, 8))):
        lengths = np.random.default_rng(seed).integers(0, 3000, rows)
        case = Decode(
            name="candidates",
            lengths=tuple(map(int, lengths)),
            heads=4 * group,
            kv_heads=4,
            head_dim=head_dim,
            page_size=64,
            window=(None, 700, None, None)[seed],
            softcap=50.0,
        )
        assert error("decode", CARD, case, sizes, "bfloat16", None, seed) < TOLERANCE, rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [(96, None), *((dim, kind) for dim in (64, 128, 256) for kind in (None, "float8_e4m3fn"))],
)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_the_tuned_sizes_extend_chunks_of_several_seeds(
    kv_dtype: str | None, head_dim: int, group: int
) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = tuple(
            (int(prefix), int(n))
            for prefix, n in zip(rng.integers(0, 900, 5), rng.integers(0, 400, 5), strict=True)
        )
        case = Extend(
            name="chunks",
            rows=rows,
            gap=seed,
            heads=2 * group,
            kv_heads=2,
            head_dim=head_dim,
            page_size=64,
            window=(None, 300, 64)[seed],
            softcap=(None, 30.0, None)[seed],
            sinks=seed == 2,
        )
        assert error("extend", CARD, case, None, "bfloat16", kv_dtype, seed) < TOLERANCE


@quiet
@pytest.mark.parametrize("place", [pytest.param(INTERPRETER, marks=pytest.mark.slow), card])
@pytest.mark.parametrize("variant", ["flags", "keys for rows"])
def test_a_row_that_is_not_split_has_the_same_bits_beside_other_rows(
    place: str, variant: str
) -> None:
    case = Decode(
        name="rows",
        lengths=pick(place, (150, 64, 1), (1500, 64, 1, 3000, 0, 700)),
        heads=4,
        kv_heads=2,
        page_size=64,
    )
    q, k, v, table, lengths = in_type(decode_cases.inputs(case), "bfloat16")
    run = jax.jit(
        functools.partial(
            hopper_decode.decode_attention,
            scale=0.1,
            no_split=True,
            tuning=DECODE_VARIANTS[variant],
            **launch_options(place),
        )
    )
    together = np.asarray(run(q, k, v, table, lengths))
    for row in range(len(lengths)):
        alone = jnp.where(jnp.arange(len(lengths)) == row, lengths, 0)
        if int(lengths[row]):
            found = np.asarray(run(q, k, v, table, alone))
            assert found[row].tobytes() == together[row].tobytes(), row


@pytest.mark.gpu
@pytest.mark.parametrize("variant", DECODE_VARIANTS)
def test_on_the_card_calls_repeat_to_the_bit(variant: str) -> None:
    """Splits end in any order; owners merge parts in the order of the plan."""
    case = Decode(
        name="repeat",
        lengths=(5000, 3, 0, 900, 64, 65),
        heads=14,
        kv_heads=2,
        head_dim=128,
        page_size=64,
    )
    args = in_type(decode_cases.inputs(case), "bfloat16")
    tuning = DECODE_VARIANTS[variant]
    plan = hopper_decode.plan(args[4], heads=14, kv_heads=2, head_dim=128, tuning=tuning)

    @jax.jit
    def layers(plan: Any, *args: jax.Array) -> tuple[list[jax.Array], Any]:
        opened = open_plan(plan)
        run = functools.partial(hopper_decode.decode_attention, tuning=tuning, plan=opened)
        return [run(*args, **case.options) for _ in range(8)], close_plan(opened)

    first = None
    for _ in range(20):
        outs, plan = layers(plan, *args)
        for out in outs:
            first = np.asarray(out) if first is None else first
            assert np.asarray(out).tobytes() == first.tobytes()


@pytest.mark.gpu
def test_on_the_card_pages_beyond_two_billion_elements_are_found() -> None:
    """The number of an element of the pool needs more than 32 bits."""
    pages, heads, size, dim = 9000, 8, 128, 256
    k = jnp.zeros((pages, heads, size, dim), jnp.bfloat16).at[-2:].set(1.0)
    assert k.size > 2**31
    table = jnp.array([[pages - 1, pages - 2]], jnp.int32)
    q = jnp.ones((1, heads, dim), jnp.bfloat16)
    out = jitted(hopper_decode.decode_attention)(
        q, k, k, table, jnp.array([200], jnp.int32), scale=0.1
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    ints = [jnp.array([x], jnp.int32) for x in (0, 1, 200)]
    extend = jax.jit(functools.partial(hopper_extend.extend_attention, scale=0.1))
    out = extend(q, k, k, table, *ints)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
