"""Every back end of the KV write passes the shared cases, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.backends import UnknownBackend
from pallas_kernels.kv_write.cases import CASES, Case, inputs

write = jax.jit(kv_write.write, static_argnames="backend")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_land_in_their_places_and_nothing_else_changes(case):
    made = inputs(case)
    for got, want in zip(write(*made.args, backend="reference"), made.expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_values_are_rounded_to_the_pages_type():
    made = inputs(Case(name="narrow", kept=10))
    k_pages, v_pages, *rest = made.args
    k, _ = write(jnp.asarray(k_pages, jnp.bfloat16), jnp.asarray(v_pages, jnp.bfloat16), *rest, backend="reference")
    np.testing.assert_array_equal(k, made.expected[0].astype(jnp.bfloat16))


def test_a_donated_pool_is_written_in_place():
    made = inputs(Case(name="large", kept=8, num_pages=256, head_dim=64))
    page_pool = made.args[0].nbytes
    compiled = jax.jit(kv_write.write, static_argnames="backend", donate_argnums=(0, 1)).lower(*made.args, backend="reference").compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * page_pool
    assert memory.temp_size_in_bytes < page_pool / 10
    pools = [line for line in compiled.as_text().splitlines() if " copy(" in line and "256,2,16,64" in line]
    assert pools == []


def test_an_unknown_back_end_is_named_with_those_that_exist():
    with pytest.raises(UnknownBackend, match=r"kv_write has no back end 'cuda'; choose one of: reference"):
        kv_write.write(*inputs(CASES[0]).args, backend="cuda")
