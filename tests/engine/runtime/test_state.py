"""Slot state: the host writes columns by name, and programs read the same values under the same
names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    Columns,
    SlotState,
    device_columns,
    host_columns,
    width_of,
)


@pytest.mark.parametrize("columns", [PROGRESS, SLOT_PARAMS])
def test_what_the_host_writes_by_name_a_program_reads_by_name(columns: Columns) -> None:
    rng, rows = np.random.default_rng(0), 5
    matrix = np.full((rows, width_of(columns)), -7, np.int32)
    written = {}
    for name, values in host_columns(matrix, columns).items():
        _, dtype = columns[name]
        drawn = (
            rng.integers(0, 2, values.shape)
            if dtype is np.bool
            else rng.integers(-(2**31), 2**31, values.shape)
        )
        values[:] = rng.standard_normal(values.shape) if dtype is np.float32 else drawn
        written[name] = values.copy()
    found = jax.jit(lambda given: device_columns(given, columns))(jnp.asarray(matrix))
    assert found.keys() == written.keys() == columns.keys()
    for name, values in found.items():
        assert values.dtype == columns[name][1]
        assert values.shape == (rows, *written[name].shape[1:][: written[name].shape[1] > 1])
        np.testing.assert_array_equal(np.asarray(values).reshape(rows, -1), written[name])


def test_columns_lie_side_by_side_and_fill_the_state() -> None:
    for columns, matrix in (
        (PROGRESS, SlotState.zeros(3, 8).progress),
        (SLOT_PARAMS, SlotState.zeros(3, 8).params),
    ):
        places = [place for place, _ in columns.values()]
        assert [place.start for place in places] == [0, *(place.stop for place in places[:-1])]
        assert matrix.shape == (4, places[-1].stop)
