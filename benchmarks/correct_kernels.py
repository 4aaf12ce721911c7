"""Every kernel beside its reference on ragged batches, few shapes each: what
`benchmarks.correctness` runs first."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_cases
from benchmarks.kernels import guarded
from jaxllm.cache.backends import HOPPER, Target, own_backend, reason_of
from pallas_kernels import add_norm as norms
from pallas_kernels import draw as draws
from pallas_kernels import gated_matmul as products
from pallas_kernels import rope_write as writes
from pallas_kernels.add_norm import cases as norm_cases
from pallas_kernels.draw import reference as draw_reference
from pallas_kernels.gated_matmul import cases as product_cases
from pallas_kernels.quantised import SCALE_DTYPE
from pallas_kernels.rope_write import cases as rope_cases

type Row = dict[str, Any]

# Of kernel_cases.DECODE_CHECKS: plain, window, float16, soft cap and head_dim 256; 8 bits from 10
# on
DECODE = (0, 3, 5, 6, 10, 13, 14)
EXTEND = (0, 3, 4, 5, 8)  # of kernel_cases.EXTEND_CHECKS; 8-bit pages from 5 on
ROPE = ("bias, groups of seven", "bias and norm, heads of 256")
NORM = "one row, width of 28 times 128"
# Tokens, outputs, inputs
PRODUCTS = (
    (1, 6144, 1024),
    (64, 37888, 3584),
    (160, 6144, 1024),
    (256, 28672, 4096),
    (2000, 6144, 1024),
)
WORKERS = 4  # kernels compile for a second or more each


def kernels() -> Iterator[Row]:
    """The Mosaic GPU kernels on Hopper; on other devices one row that says why nothing was
    checked."""
    target = Target.of(jax.devices()[0])
    backend = own_backend(target)
    if not HOPPER.met_by(target):
        yield {"check": "kernels", "skipped": f"no Mosaic GPU kernels here ({reason_of(target)})"}
        return
    checks: list[tuple[str, Callable[[], Row]]] = []
    for i in DECODE:
        check = kernel_cases.DECODE_CHECKS[i]
        checks.append(
            (f"decode {named(check)}", functools.partial(kernel_cases.check_decode, check))
        )
    for i in EXTEND:
        check = kernel_cases.EXTEND_CHECKS[i]
        checks.append(
            (f"extend {named(check)}", functools.partial(kernel_cases.check_extend, check))
        )
    for case in (case for case in rope_cases.CASES if case.name in ROPE):
        checks.append(
            (f"rope and KV write: {case.name}", functools.partial(check_rope, case, backend))
        )
        checks.append(
            (
                f"rope and KV write in 8 bits: {case.name}",
                functools.partial(check_narrow_write, case, backend),
            )
        )
        given = functools.partial(check_narrow_write, case, backend, given=(0.0123, 0.0031))
        checks.append((f"rope and KV write in 8 bits by given scales: {case.name}", given))
    for tokens, outputs, inputs in PRODUCTS:
        shape = product_cases.Case(name="", tokens=tokens, outputs=outputs, inputs=inputs)
        checks.append(
            (
                f"gated product {tokens}x{inputs}x{outputs}",
                functools.partial(check_product, shape, backend),
            )
        )
    for norm in (case for case in norm_cases.CASES if case.name == NORM):
        checks.append((f"sum and norm: {norm.name}", functools.partial(check_norm, norm, backend)))
    checks.append(("draw: what is allowed", functools.partial(check_allowed, backend, 152064)))
    checks.append(("draw: frequencies", functools.partial(check_frequencies, backend)))

    def run(item: tuple[str, Callable[[], Row]]) -> Row:
        begin = time.perf_counter()
        return (
            {"check": item[0], "ok": False}
            | guarded(item[1])
            | {"seconds": round(time.perf_counter() - begin, 2)}
        )

    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(run, checks)


def named(check: kernel_cases.Check) -> str:
    """What tells one ragged batch from the others."""
    more = {"window": check.window, "softcap": check.softcap, "queries": check.chunks or None}
    options = [f"{name} {value}" for name, value in more.items() if value]
    heads = f"{check.K}x{check.group} heads of {check.H}"
    return ", ".join([heads, f"pages of {check.page}", check.kv_dtype or check.dtype, *options])


def rows_of(case: rope_cases.Case, made: rope_cases.Inputs) -> writes.HeadRows:
    """The case's rows in bfloat16."""
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    norms = None if made.norms is None else (low(made.norms[0]), low(made.norms[1]))
    bias = None if made.bias is None else low(made.bias)
    return writes.HeadRows(
        low(made.qkv),
        jnp.asarray(made.cos),
        jnp.asarray(made.sin),
        bias,
        norms,
        case.eps,
        case.heads,
    )


def check_narrow_write(
    case: rope_cases.Case,
    backend: str,
    kv_dtype: str = kernel_cases.E4M3,
    given: tuple[float, float] | None = None,
) -> Row:
    """Pages and scales after one call, by each token's own scale, or for each head up to twice
    those `given` of keys and of values: numbers may differ from the reference's by one unit, and
    seldom, scales never; and whether the donated pools were updated in place."""
    made = rope_cases.inputs(case)
    rows, places = rows_of(case, made), (jnp.asarray(made.page), jnp.asarray(made.offset))
    if given is not None:
        by_head = 1 + jnp.arange(case.kv_heads)[:, None] / case.kv_heads
        rows = replace(rows, kv_scales=(jnp.asarray(given) * by_head).astype(SCALE_DTYPE))
    shape = made.k_pages.shape
    pools = [
        jnp.zeros(shape, kv_dtype),
        jnp.zeros(shape, kv_dtype),
        jnp.zeros((*shape[:2], 2, shape[2]), SCALE_DTYPE),
    ]

    def write(pools: list[jax.Array], backend: str) -> tuple[jax.Array, ...]:
        k_pages, v_pages, scales = pools
        return writes.rope_write(rows, k_pages, v_pages, *places, scales=scales, backend=backend)

    jitted = jax.jit(write, static_argnames="backend", donate_argnums=0)
    _, *wanted = jax.jit(write, static_argnames="backend")(pools, backend="reference")
    compiled = jitted.lower(pools, backend=backend).compile()
    size = sum(pool.nbytes for pool in pools)
    _, *found = compiled(pools)
    bits = [
        [np.asarray(x).view(np.uint8).astype(int) for x in side[:2]] for side in (found, wanted)
    ]
    apart = np.stack([np.abs(x - y) for x, y in zip(*bits, strict=True)])
    scales = int((np.asarray(found[2], np.float32) != np.asarray(wanted[2], np.float32)).sum())
    in_place = compiled.memory_analysis().alias_size_in_bytes >= size
    ok = in_place and not scales and int(apart.max()) <= 1 and float((apart > 0).mean()) < 1e-3
    return {
        "differing": int((apart > 0).sum()),
        "units": int(apart.max()),
        "scales_differing": scales,
        "in_place": in_place,
        "ok": ok,
    }


def check_rope(case: rope_cases.Case, backend: str) -> Row:
    """Queries and both pools after one call, and whether the donated pools were updated in
    place."""
    made = rope_cases.inputs(case)
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    rows = rows_of(case, made)
    args = (
        rows,
        low(made.k_pages),
        low(made.v_pages),
        jnp.asarray(made.page),
        jnp.asarray(made.offset),
    )
    pools = args[1].nbytes + args[2].nbytes
    wanted = writes.rope_write(
        *jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args),
        backend="reference",
    )
    run = (
        jax.jit(functools.partial(writes.rope_write, backend=backend), donate_argnums=(1, 2))
        .lower(*args)
        .compile()
    )
    found = [kernel_cases.difference(x, y) for x, y in zip(run(*args), wanted, strict=True)]
    memory = run.memory_analysis()
    in_place = memory.alias_size_in_bytes >= pools
    worst = max(found, key=lambda row: row["error"])
    return worst | {"in_place": in_place, "ok": in_place and all(row["ok"] for row in found)}


def check_norm(case: norm_cases.Case, backend: str) -> Row:
    """The sum, which must be the rounded one exactly, and its norm beside numpy in float64."""
    made = norm_cases.inputs(case)
    x, delta, weight = (jnp.asarray(a, jnp.bfloat16) for a in (made.x, made.delta, made.weight))
    total, norm = jax.jit(functools.partial(norms.add_norm, eps=case.eps, backend=backend))(
        x, delta, weight
    )
    wanted = norm_cases.expected(case, *(np.asarray(a) for a in (x, delta, weight)))
    exact = bool((np.asarray(total, np.float64) == wanted[0]).all())
    found = kernel_cases.difference(norm, jnp.asarray(wanted[1], jnp.float32))
    return found | {"sum_exact": exact, "ok": exact and found["ok"]}


def check_product(case: product_cases.Case, backend: str) -> Row:
    """The gated product, beside numpy in float64 on the same rounded factors."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in product_cases.inputs(case))
    wanted = product_cases.expected(np.asarray(x), np.asarray(w), products.SILU)
    return kernel_cases.difference(
        jax.jit(functools.partial(products.gated_matmul, gating=products.SILU, backend=backend))(
            x, w
        ),
        jnp.asarray(wanted, jnp.float32),
    )


def check_allowed(backend: str, vocabulary: int, batch: int = 64) -> Row:
    """Rows of every kind in one batch: greedy and top-1 rows take the best token, no row draws what
    its filters or bans exclude, and the same keys draw the same tokens again."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(batch, vocabulary)) * 3, jnp.float32)
    kind = np.arange(batch) % 8  # greedy, plain, top-1, top-k, top-p, min-p, all of them, banned
    best = np.asarray(jnp.argmax(logits, axis=1))
    rows = draws.DrawRows(
        temperature_B=jnp.asarray(
            np.where(kind == 0, 0.0, rng.uniform(0.5, 1.5, batch)), jnp.float32
        ),
        top_k_B=jnp.asarray(
            np.select([kind == 2, kind == 3, kind == 6], [1, 50, 200], 0), jnp.int32
        ),
        top_p_B=jnp.asarray(np.select([kind == 4, kind == 6], [0.5, 0.9], 1.0), jnp.float32),
        min_p_B=jnp.asarray(np.select([kind == 5, kind == 6], [0.1, 0.01], 0.0), jnp.float32),
        key_B2=jnp.asarray(rng.integers(0, 2**32, (batch, 2), np.uint32)),
        banned_BK=jnp.asarray(np.where(kind == 7, best, -1)[:, None], jnp.int32),
    )
    run = jax.jit(functools.partial(draws.draw, backend=backend))
    token = np.asarray(run(logits, rows))
    again = np.asarray(run(logits, rows))
    allowed = np.asarray(jax.jit(_allowed)(logits, rows))
    forbidden = int(sum(t < 0 or not row[t] for t, row in zip(token, allowed, strict=True)))
    exact = int((token != best)[(kind == 0) | (kind == 2)].sum())
    repeated = bool((token == again).all())
    return {
        "rows": batch,
        "forbidden": forbidden,
        "not_the_best": exact,
        "repeats": repeated,
        "ok": not forbidden + exact and repeated,
    }


def _allowed(logits: jax.Array, rows: draws.DrawRows) -> jax.Array:
    """Which tokens each row may draw. A float's rounding apart: thresholds are taken a hair
    lower."""
    plain = draw_reference.mask_banned(logits, rows.banned_BK)
    scaled = plain / jnp.where(rows.temperature_B < 1e-5, 1.0, rows.temperature_B)[:, None]
    kept = draw_reference.apply_filters(scaled, rows)
    least = jnp.min(jnp.where(jnp.isfinite(kept), kept, jnp.inf), axis=1, keepdims=True)
    return scaled >= least - 1e-4


def check_frequencies(
    backend: str, launches: int = 40, batch: int = 256, vocabulary: int = 1024
) -> Row:
    """How far the share of each token in many draws lies from the softmax (total variation); half
    of the draws filtered by top-p, where the expected shares are those of the kept tokens."""
    rng = np.random.default_rng(1)
    logits = np.full(vocabulary, -20.0, np.float32)
    logits[rng.permutation(vocabulary)[:16]] = rng.normal(size=16)
    top_p = np.where(np.arange(batch) % 2, 0.8, 1.0)
    full, ints = functools.partial(jnp.full, (batch,)), np.zeros((batch,), np.int32)
    plain = draws.DrawRows(
        full(1.0),
        jnp.asarray(ints),
        jnp.asarray(top_p, jnp.float32),
        full(0.0),
        _keys(rng, batch),
        full(-1)[:, None],
    )
    table = jnp.broadcast_to(jnp.asarray(logits), (batch, vocabulary))
    run = jax.jit(functools.partial(draws.draw, backend=backend))
    counts = np.zeros((2, vocabulary))
    for _ in range(launches):
        rows = draws.DrawRows(
            plain.temperature_B,
            plain.top_k_B,
            plain.top_p_B,
            plain.min_p_B,
            _keys(rng, batch),
            plain.banned_BK,
        )
        token = np.asarray(run(table, rows))
        for half in range(2):
            counts[half] += np.bincount(token[half::2], minlength=vocabulary)
    kept = np.asarray(
        jax.nn.softmax(
            draw_reference.apply_filters(table[:2], jax.tree.map(lambda x: x[:2], plain)), axis=1
        )
    )
    apart = [
        float(np.abs(count / count.sum() - share).sum() / 2)
        for count, share in zip(counts, kept, strict=True)
    ]
    by_chance = float(
        np.sqrt(2 * kept * (1 - kept) / (np.pi * launches * batch / 2)).sum(axis=1).max() / 2
    )
    return {
        "draws": launches * batch,
        "plain": apart[0],
        "top_p": apart[1],
        "by_chance": by_chance,
        "ok": max(apart) < 2 * by_chance,
    }


def _keys(rng: np.random.Generator, batch: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, 2**32, (batch, 2), np.uint32))
