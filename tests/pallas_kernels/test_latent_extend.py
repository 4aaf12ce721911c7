"""Latent extend: chunks over latents give what attention over expanded keys and values gives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_decode
from pallas_kernels.latent_extend import latent_extend, mosaic_gpu, reference
from pallas_kernels.latent_extend.cases import CASES, Case, inputs
from pallas_kernels.paged_extend.mosaic_gpu import Tuning
from tests.pallas_kernels.places import (
    INTERPRETER,
    launch_options,
    poison_outputs,
    relative_error,
    shape_of,
    slow_places,
)

extend = jax.jit(latent_extend, static_argnames=("backend", "scale"))


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunks_attend_as_if_latents_were_expanded(case: Case, backend: str) -> None:
    made = inputs(case)
    out = extend(*made.args, backend=backend, **case.options)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, made.expected, rtol=2e-4, atol=2e-5)


def test_a_layer_may_begin_anywhere_in_a_pool_of_several() -> None:
    case = Case(name="layers", prefixes=(17, 0, 130), chunks=(5, 33, 16))
    q, up, pages, *places = inputs(case).args
    options = {"backend": "reference", **case.options}
    wanted = extend(q, up, pages, *places, **options)
    pool, first = np.concatenate([np.full_like(pages, np.nan), pages]), np.array([len(pages)])
    np.testing.assert_array_equal(
        extend(q, up, pool, *places, first_page=first.astype(np.int32), **options), wanted
    )


WIDE = {"heads": 8, "plain": 32, "rope": 64, "value": 64, "rank": 128, "page_size": 64}


def error(place: str, case: Case, **planned: Any) -> float:
    """Of the Hopper kernels against the reference over the same rounded inputs."""
    made = inputs(case)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (made.q, made.up, made.pages))
    poison_outputs(place, shape_of(low[0]))
    tuning = Tuning(groups=1, blocks=8, min_tiles=1) if place == INTERPRETER else None
    sizes = {"heads": case.heads, "widths": (96, 64), "page_size": case.page_size} | planned
    plan = mosaic_gpu.plan(*made.places, tokens=len(made.q), tuning=tuning, **sizes)
    run = functools.partial(
        mosaic_gpu.latent_extend, tuning=tuning, **case.options, **launch_options(place)
    )
    out = jax.jit(run)(*low, *made.places, plan=plan)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    return relative_error(out, reference.latent_extend(*wide, *made.places, **case.options))


quiet = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@quiet
@slow_places
def test_on_hopper_short_contexts_are_expanded_and_long_ones_absorbed(place: str) -> None:
    case = Case(name="", prefixes=(9, 0, 390), chunks=(12, 0, 3), **WIDE)
    assert error(place, case) < 1e-2


@quiet
@slow_places
@pytest.mark.parametrize("planned", [{}, {"no_split": True}], ids=["expanded", "no split"])
def test_on_hopper_prompts_equal_the_reference(place: str, planned: dict[str, Any]) -> None:
    case = Case(name="", prefixes=(0, 70, 0), chunks=(70, 1, 130), **WIDE)
    assert error(place, case, **planned) < 1e-2


@quiet
@slow_places
def test_on_hopper_keys_of_192_meet_values_of_128(place: str) -> None:
    sizes = WIDE | {"plain": 128, "value": 128}
    case = Case(name="", prefixes=(0, 70, 0), chunks=(70, 1, 130), **sizes)
    assert error(place, case, widths=(192, 128)) < 1e-2


@pytest.mark.slow
def test_rows_with_the_fewest_pages_are_expanded_as_far_as_there_is_room() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6) + 100
    starts, chunks = np.array([0, 4, 8, 12], np.int32), np.array([4, 4, 0, 4], np.int32)
    sizes = {"tokens": 16, "heads": 8, "widths": (96, 64), "page_size": 16}
    made = mosaic_gpu.plan(table, starts, chunks, np.array([33, 50, 70, 16], np.int32), **sizes)
    assert made.expanded is not None  # six pages of room, three and one are taken
    assert made.expanded.lengths_R.tolist() == [4, 0, 0, 4]
    assert made.expanded.page_E[:4].tolist() == [100, 101, 102, 118]
    assert made.expanded.table_RM[:, 0].tolist() == [0, 3, 3, 3]
    assert made.absorbed.seen_ST.tolist() == [[0] * 4 + [47, 48, 49, 50] + [0] * 8]
    assert made.absorbed.table_STM[0, 4].tolist() == table[1].tolist()
    assert made.bounds.tolist() == [0, 1]


@quiet
@pytest.mark.slow
def test_on_hopper_long_steps_absorb_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "UNASKED", 0)
    monkeypatch.setattr(mosaic_gpu, "SLAB", 16)
    case = Case(name="", prefixes=(9, 0, 390), chunks=(12, 0, 3), **WIDE)
    assert error(INTERPRETER, case) < 1e-2


def test_slabs_of_a_loop_hold_every_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: jax.Array, pages: jax.Array, *rows: jax.Array, **options: Any) -> jax.Array:
        del options["plan"], options["interpret"], options["no_split"]
        return latent_decode.latent_decode(q, pages, *rows, backend="reference", **options)

    monkeypatch.setattr(mosaic_gpu.decode, "latent_decode", attend)
    monkeypatch.setattr(mosaic_gpu, "UNASKED", 0)
    monkeypatch.setattr(mosaic_gpu, "SLAB", 16)
    case = Case(name="", prefixes=(9, 0, 30), chunks=(20, 0, 17))
    made = inputs(case)
    assert len(made.q) % 16  # so the last slab begins within the one before
    run = functools.partial(mosaic_gpu.latent_extend, no_split=True, **case.options)
    np.testing.assert_allclose(jax.jit(run)(*made.args), made.expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_loop_has_no_slab_where_all_rows_are_expanded() -> None:
    table, one = np.zeros((1, 6), np.int32), np.array([4], np.int32)
    sizes = {"tokens": 16, "heads": 8, "widths": (96, 64), "page_size": 16}
    made = jax.jit(functools.partial(mosaic_gpu.plan, **sizes))(table, one * 0, one, one)
    assert made.bounds.tolist() == [0, 0]


def test_without_splits_no_row_depends_on_the_room_that_others_leave() -> None:
    table, one = np.zeros((1, 6), np.int32), np.array([4], np.int32)
    sizes = {"tokens": 16, "heads": 8, "widths": (96, 64), "page_size": 16}
    made = mosaic_gpu.plan(table, one * 0, one, one, no_split=True, **sizes)
    assert made.expanded is None
