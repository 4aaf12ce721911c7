"""Latent decode: every back end passes the shared cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_decode import latent_decode
from pallas_kernels.latent_decode.cases import CASES, Case, inputs

attend = jax.jit(latent_decode, static_argnames=("backend", "scale", "value_dim"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_gives_what_the_definition_says(case: Case) -> None:
    made = inputs(case)
    out = attend(*made.args, backend="reference", **case.options)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, made.expected, rtol=2e-5, atol=2e-6)


def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit() -> None:
    case = Case(name="alone", lengths=(1, 130, 0, 64))
    q, pages, table, lengths = inputs(case).args
    together = np.asarray(attend(q, pages, table, lengths, backend="reference", **case.options))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = attend(q[one], pages, table[one], lengths[one], backend="reference", **case.options)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_layer_may_begin_anywhere_in_a_pool_of_several() -> None:
    case = Case(name="layers", lengths=(40, 3))
    q, pages, table, lengths = inputs(case).args
    wanted = attend(q, pages, table, lengths, backend="reference", **case.options)
    pool = np.concatenate([np.full_like(pages, np.nan), pages])
    first = jnp.array([len(pages)], jnp.int32)
    found = attend(q, pool, table, lengths, backend="reference", first_page=first, **case.options)
    np.testing.assert_array_equal(found, wanted)
