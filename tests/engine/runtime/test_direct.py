"""Programs are called without JAX's look at each argument, and do what they do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.direct import direct
from jaxllm.mesh import LAYER, make_mesh
from jaxllm.messages import GenerateRequest
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def add(weights: tuple[jax.Array, ...], pair: Pair, unused: jax.Array) -> tuple[Any, ...]:
    return Pair(pair.left + weights[0], pair.right), (pair.left.sum(), weights[1])


def compiled(
    devices: int,
) -> tuple[jax.stages.Compiled, Callable[[], tuple[Any, ...]], NamedSharding]:
    """A program that takes `pair` over, and makes its arguments."""
    mesh = make_mesh(devices)
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec(LAYER), PartitionSpec()))

    def arguments() -> tuple[Any, ...]:
        weights, numbers = np.ones((4, 2), np.float32), np.arange(8.0, dtype=np.float32)
        given = (weights, weights * 3), Pair(numbers.reshape(4, 2), numbers), numbers
        places = (split, whole), Pair(split, whole), whole
        return jax.tree.map(jax.device_put, given, places)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments()
    )
    out = Pair(split, whole), (whole, whole)
    made = jax.jit(add, donate_argnums=(1,), out_shardings=out, keep_unused=True)
    return made.lower(*shapes).compile(), arguments, split


@pytest.mark.parametrize("devices", [1, 2])
def test_results_places_and_buffers_taken_over_are_those_of_the_program(devices: int) -> None:
    program, arguments, split = compiled(devices)
    call = direct(program)
    assert call is not program, "this release of JAX offers no direct call"
    usual, given = program(*arguments()), arguments()
    found = call(*given)
    assert jax.tree.structure(found) == jax.tree.structure(usual)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(usual), strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one.sharding, one.aval) == (other.sharding, other.aval)
        assert one.committed == other.committed
    assert found[0].left.sharding == split
    assert given[1].left.is_deleted() and not given[0][0].is_deleted()
    again = program(given[0], found[0], given[2])
    np.testing.assert_array_equal(call(given[0], again[0], given[2])[0].left, usual[0].left + 2)


def test_an_array_that_was_taken_over_cannot_be_given_again() -> None:
    program, arguments, _ = compiled(1)
    call, given = direct(program), arguments()
    call(*given)
    with pytest.raises(RuntimeError, match="deleted"):
        call(*given)


def test_where_jax_has_no_such_parts_the_program_itself_is_called() -> None:
    program = jnp.add
    assert direct(program) is program  # type: ignore[arg-type]


def test_a_search_for_nans_is_left_to_jax() -> None:
    program, *_ = compiled(1)
    with jax.debug_nans(True):
        assert direct(program) is program


def test_every_program_of_an_engine_is_called_directly_and_checked_again_after_a_failure(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, presence_penalty=0.5)
    ask = GenerateRequest(id="r", prompt_token_ids=[1, 2], params=params)
    before = [delta.token_ids for delta in collect(engine, [ask])]
    runner = engine.runner
    programs = {"extend", "decode", "update_slots", "set_slot", "process_logits", "sample"}
    assert {key.program for key in runner._bound} == {*programs, "logprobs"}
    for key, (call, *_) in runner._bound.items():
        assert not isinstance(call, jax.stages.Compiled), key
    runner.reset()
    assert not runner._bound, "JAX looks at the new arrays"
    assert [delta.token_ids for delta in collect(engine, [ask])] == before
