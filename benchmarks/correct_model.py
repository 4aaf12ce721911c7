"""A whole model, teacher-forced: its logits by the device's back end beside the reference's on the
same weights.

Both round to bfloat16 after every operation. How far that alone takes the logits is told by the
distance of each to the same weights in float32: where the reference is itself further away than the
bound, two ways of rounding cannot be expected to agree better.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.shapes import PREFIX, engine_options
from jaxllm import models, weights
from jaxllm.cache.arrays import DROP_PAGE, KVCache, PagedArrays, Zeros
from jaxllm.cache.backends import Target, own_backend
from jaxllm.cache.groups import Place
from jaxllm.cache.kv import PagedContext
from jaxllm.cache.step import PagedInputs
from jaxllm.mesh import make_mesh
from pallas_kernels.target import PORTABLE

type Row = dict[str, Any]

PAGE = 64
STEPS = 32  # decode steps, after prompts of as many tokens or fewer
BATCHES = ((32,), (32, 21, 9, 1))  # prompt lengths
CHUNK = 16  # prompt tokens of one forward
BOUND = 1e-2
NARROW = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Variant:
    """One way to compute the logits."""

    backend: str
    dtype: Any
    kv_dtype: Any = None  # of the pages, None = dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """One forward of R sequences, each with as many tokens, of which `lengths_R` count. A padding
    token's position is any."""

    token_T: Array
    position_T: Array
    lengths_R: Array  # 0 = row not in use
    table_RM: Array


def model(name: str, backend: str | None = None) -> Iterator[Row]:
    """The figures of a shape with random bfloat16 weights: alone and in a ragged batch. `backend`
    is the device's own by default."""
    if not name.startswith(PREFIX):
        raise ValueError(f"teacher forcing needs {PREFIX}NAME, got {name}")
    directory, mesh = engine_options(name)["model"], make_mesh(1)
    spec = models.read_spec(directory)
    own = Variant(backend or own_backend(Target.of(mesh.devices.flat[0])), jnp.bfloat16)
    variants = [own, Variant("reference", jnp.bfloat16), Variant("reference", jnp.float32)]
    state = weights.load(directory, weights.outline(spec, mesh, jnp.bfloat16), "dummy")[1]
    forced = TeacherForced(spec, mesh)
    programs = forced.compile_all(variants)
    logits: dict[tuple[Variant, tuple[int, ...]], list[Array]] = {}
    for variant in variants:
        held = jax.tree.map(lambda x: x.astype(variant.dtype), state)  # noqa: B023
        for prompts in BATCHES:
            logits[variant, prompts] = forced.run(programs, variant, held, prompts)
    for prompts in BATCHES:
        found, reference, exact = (logits[variant, prompts] for variant in variants)
        apart = errors(found, reference)
        mine, theirs = errors(found, exact), errors(reference, exact)
        yield {
            "check": f"{name.removeprefix(PREFIX)}, prompts {prompts}, {STEPS} decode steps: "
            f"{own.backend} beside reference",
            "positions": sum(prompts) + STEPS * len(prompts),
            "error_max": max(apart),
            "error_mean": float(np.mean(apart)),
            "prefill_errors": apart[: -STEPS or None],
            "decode_error_last": apart[-1],
            f"{own.backend}_to_float32_max": max(mine),
            "reference_to_float32_max": max(theirs),
            "no_worse_than_reference": max(mine) <= 1.1 * max(theirs),
            "bound": BOUND,
            "ok": max(apart) < BOUND,
        }


def narrow_pages(name: str, backend: str | None = None) -> Iterator[Row]:
    """What 8-bit pages cost a shape with random bfloat16 weights: the distance of its logits to
    float32, and how far the device's kernels add to the reference's. Alone and in a ragged batch.
    """
    directory, mesh = engine_options(name)["model"], make_mesh(1)
    spec = models.read_spec(directory)
    own = backend or own_backend(Target.of(mesh.devices.flat[0]))
    state = weights.load(directory, weights.outline(spec, mesh, jnp.bfloat16), "dummy")[1]
    forced = TeacherForced(spec, mesh)
    exact, full = Variant("reference", jnp.float32), Variant(own, jnp.bfloat16)
    pairs = {
        kind: [Variant(each, jnp.bfloat16, jnp.dtype(kind)) for each in (own, "reference")]
        for kind in NARROW
    }
    variants = [exact, full, *(variant for pair in pairs.values() for variant in pair)]
    programs = forced.compile_all(variants)
    for prompts in BATCHES:
        logits = {}
        for variant in variants:
            held = jax.tree.map(lambda x: x.astype(variant.dtype), state)  # noqa: B023
            logits[variant] = forced.run(programs, variant, held, prompts)
        before = float(np.mean(errors(logits[full], logits[exact])))
        for kind, (kernels, reference) in pairs.items():
            mine, theirs = (
                float(np.mean(errors(logits[variant], logits[exact])))
                for variant in (kernels, reference)
            )
            yield {
                "check": f"{name.removeprefix(PREFIX)}, prompts {prompts}, {STEPS} decode steps: "
                f"pages of {kind}",
                "backend": own,
                f"{own}_to_float32_mean": mine,
                "reference_to_float32_mean": theirs,
                f"{own}_with_bfloat16_pages_mean": before,
                "ok": mine < 1.1 * theirs,
            }


@jax.jit
def _error(found: Array, wanted: Array) -> Array:
    return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)


def errors(found: list[Array], wanted: list[Array]) -> list[float]:
    """Relative error in the Frobenius norm, forward by forward; infinite where logits are not
    finite.
    """
    each = [float(_error(x, y)) for x, y in zip(found, wanted, strict=True)]
    return [error if np.isfinite(error) else float("inf") for error in each]


class TeacherForced:
    """Forwards of fixed token sequences of one model through `PagedContext`."""

    def __init__(self, spec: models.ModelSpec, mesh: jax.sharding.Mesh):
        self.spec, self.mesh = spec, mesh
        self.outline = functools.cache(lambda dtype: weights.outline(spec, mesh, dtype))
        self.width = -(-(max(max(prompts) for prompts in BATCHES) + STEPS) // PAGE)

    def compile_all(self, variants: list[Variant]) -> dict[tuple[Variant, int, int], Any]:
        """Executables by variant, rows and tokens a row: lowered in turn, compiled in threads."""
        keys = [
            (variant, len(prompts), chunk)
            for variant in variants
            for prompts in BATCHES
            for chunk in (CHUNK, 1)
        ]
        lowered = [self._lower(*key) for key in keys]
        with ThreadPoolExecutor(8) as pool:
            return dict(
                zip(keys, pool.map(lambda program: program.compile(), lowered), strict=True)
            )

    def run(
        self,
        programs: dict[tuple[Variant, int, int], Any],
        variant: Variant,
        state: Any,
        prompts: tuple[int, ...],
    ) -> list[Array]:
        """Logits of the real tokens `[n, V]` of every forward: the prompts in two chunks, then a
        token a row."""
        rng = np.random.default_rng(0)
        rows = len(prompts)
        said = rng.integers(0, self.spec.vocab_size, (rows, max(prompts) + STEPS))
        table = jnp.asarray(rng.permutation(rows * self.width).reshape(rows, self.width), jnp.int32)
        pool = Zeros()(self._pool(rows, variant.kv_dtype or variant.dtype))
        done, out = np.zeros(rows, int), []
        for step in range(-(-max(prompts) // CHUNK) + STEPS):
            chunk = CHUNK if step * CHUNK < max(prompts) else 1
            count = (
                np.minimum(np.maximum(np.array(prompts) - done, 0), CHUNK)
                if chunk > 1
                else np.ones(rows, int)
            )
            token, position = np.zeros((2, rows, chunk), np.int32)
            for row in range(rows):
                token[row, : count[row]] = said[row, done[row] : done[row] + count[row]]
                position[row] = done[row] + np.arange(chunk)
            flat = [jnp.asarray(x.reshape(-1), jnp.int32) for x in (token, position, count)]
            given = Tokens(flat[0], flat[1], flat[2], table)
            logits, pool = programs[variant, rows, chunk](state, pool, given)
            real = (np.arange(chunk) < count[:, None]).reshape(-1)
            out.append(logits[np.flatnonzero(real)])
            done += count
        return out

    def _pool(self, rows: int, dtype: Any) -> KVCache:
        layers = self.spec.layers
        pages = rows * self.width
        return (PagedArrays.abstract(layers[0], len(layers), pages, PAGE, dtype, self.mesh),)

    def _lower(self, variant: Variant, rows: int, chunk: int) -> Any:
        outline = self.outline(variant.dtype)
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        given: Any = Tokens(
            ints((rows * chunk,)), ints((rows * chunk,)), ints((rows,)), ints((rows, self.width))
        )
        step = functools.partial(forward, outline.graphdef, variant.backend, chunk)
        return jax.jit(step, donate_argnums=1).lower(
            outline.state, self._pool(rows, variant.kv_dtype or variant.dtype), given
        )


def forward(
    graphdef: Any,
    backend: str,
    chunk: int,
    state: Any,
    pool: KVCache,
    given: Tokens,
) -> tuple:
    """Logits of all tokens, and the pool. Rows of one token are decode rows, others are chunks."""
    rows = given.lengths_R.shape[0]
    module = nnx.merge(graphdef, state)
    position = given.position_T.reshape(rows, chunk)
    owned = jnp.take_along_axis(
        given.table_RM, jnp.minimum(position // PAGE, given.table_RM.shape[1] - 1), axis=1
    )
    used = jnp.arange(chunk) < given.lengths_R[:, None]
    page = jnp.where(used, owned, DROP_PAGE).reshape(-1)
    before = position[:, 0]
    none, no_table = jnp.zeros((0,), jnp.int32), given.table_RM[:0]
    decoding = chunk == 1
    starts = jnp.arange(rows, dtype=jnp.int32) * chunk
    inputs = PagedInputs(
        decode_tables_BM=given.table_RM if decoding else no_table,
        decode_lengths_B=before + 1 if decoding else none,
        chunk_tables_RM=no_table if decoding else given.table_RM,
        chunk_starts_R=none if decoding else starts,
        chunk_lengths_R=none if decoding else given.lengths_R,
        chunk_kv_lengths_R=none if decoding else before + given.lengths_R,
        write_page_T=page,
        write_offset_T=given.position_T % PAGE,
    )
    places = [Place(0, layer) for layer in range(pool[0].layers)]
    own = Target.of(jax.devices()[0])
    target = own if backend == own_backend(own) else PORTABLE
    context = PagedContext(pool, places, [inputs], backend, target=target)
    hidden_TD = module(given.token_T, given.position_T, context)
    return module.logits(hidden_TD, context), context.kv
