"""The mesh, and where logical axes lie on it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxllm.config import ConfigError
from jaxllm.mesh import AXES, LAYER, _of_every_host, _of_whole_stages, make_mesh, sharding


def test_one_device_is_a_mesh_of_ones() -> None:
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {"data": 1, "tensor": 1, "expert": 1}


def test_a_mesh_takes_the_first_devices() -> None:
    mesh = make_mesh(4)
    assert dict(mesh.shape) == {"data": 1, "tensor": 4, "expert": 1}
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


@dataclass(frozen=True)
class Device:
    """Of one of several hosts."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_a_mesh_over_hosts_takes_as_many_devices_of_each() -> None:
    devices = [Device(id, id // 4) for id in range(8)]
    assert [device.id for device in _of_every_host(4, devices)] == [0, 1, 4, 5]
    for count, hosts in ((3, devices), (6, devices[1:4] + devices[4:6])):
        with pytest.raises(ConfigError, match="over 2 hosts takes as many devices of each"):
            _of_every_host(count, hosts)


def test_hosts_have_whole_stages_and_the_controller_the_last_ones() -> None:
    devices = [Device(id, id // 4) for id in range(12)]
    assert [device.id for device in _of_whole_stages(2, 3, devices)] == [4, 5, 8, 9, 0, 1]
    assert [device.id for device in _of_whole_stages(1, 6, devices)] == [4, 5, 8, 9, 0, 1]
    with pytest.raises(ConfigError, match="2 stages of 2 devices need 4 devices, but on one host "):
        _of_whole_stages(2, 6, devices[:-1])
    with pytest.raises(ConfigError, match="a stage of 5 needs 5 devices, but on one host "):
        _of_whole_stages(5, 3, devices)


def test_logical_axes_follow_the_table() -> None:
    mesh = make_mesh(2)
    assert sharding(mesh, ("embed", "heads", None)).spec == PartitionSpec(None, LAYER)
    assert sharding(mesh, ("embed",)).spec == PartitionSpec()
    assert set(AXES.values()) <= {None, LAYER, *mesh.axis_names}


def test_an_axis_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown logical axes \\['hedas'\\]"):
        sharding(make_mesh(1), ("hedas", "embed"))
