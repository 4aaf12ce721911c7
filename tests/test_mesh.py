"""The mesh, and where logical axes lie on it."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxllm.config import ConfigError
from jaxllm.mesh import AXES, make_mesh, sharding


def test_one_device_is_a_one_by_one_mesh() -> None:
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {"data": 1, "tensor": 1}


def test_a_mesh_takes_the_first_devices() -> None:
    mesh = make_mesh(4)
    assert dict(mesh.shape) == {"data": 1, "tensor": 4}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_too_few_devices_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs 16 devices, but there are 8 \(cpu\); set tensor_parallel_size to at most 8",
    ):
        make_mesh(16)
    with pytest.raises(ConfigError, match="there are 2"):
        make_mesh(4, jax.devices()[:2])
    with pytest.raises(ConfigError, match="at least 1"):
        make_mesh(0)


def test_logical_axes_follow_the_table() -> None:
    mesh = make_mesh(2)
    assert sharding(mesh, ("embed", "heads", None)).spec == PartitionSpec(None, "tensor")
    assert sharding(mesh, ("embed",)).spec == PartitionSpec()
    assert set(AXES.values()) <= {None, *mesh.axis_names}


def test_an_axis_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown logical axes \\['hedas'\\]"):
        sharding(make_mesh(1), ("hedas", "embed"))
