"""The host's buffers: what is sent arrives on every device, and no buffer is written while a step
may still read it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.launch import HostBuffers, begin_read, read, view
from jaxllm.mesh import make_mesh


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_every_device_gets_the_buffer_and_a_slot_is_used_again_in_its_turn(
    devices: int, memory: str
) -> None:
    sharding = NamedSharding(make_mesh(devices), PartitionSpec(), memory_kind=memory)
    uplink = HostBuffers(8, sharding, 3)
    for turn in range(5):
        sent = uplink.send(np.array([turn] * 3 + [-turn] * 2, np.int32))
        for shard in sent.addressable_shards:
            assert np.array(shard.data)[:5].tolist() == [turn] * 3 + [-turn] * 2
    assert len(sent.addressable_shards) == devices and isinstance(sent, jax.Array)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_a_leased_buffer_is_the_one_that_is_sent(devices: int, memory: str) -> None:
    sharding = NamedSharding(make_mesh(devices), PartitionSpec(), memory_kind=memory)
    buffers = HostBuffers(4, sharding, 2)
    for turn in range(3):
        leased = buffers.lease()
        assert memory == "device" or buffers.lease() is leased
        leased[:] = turn
        sent = buffers.send(leased)
        for shard in sent.addressable_shards:
            assert np.array(shard.data).tolist() == [turn] * 4
        other = buffers.send(np.full(4, -1, np.int32))
        assert [np.array(array)[0] for array in (sent, other)] == [turn, -1]


@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_what_was_sent_stays_when_its_memory_is_written_again(memory: str) -> None:
    buffers = HostBuffers(1024, NamedSharding(make_mesh(1), PartitionSpec(), memory_kind=memory), 2)
    buffer = np.ones(1024, np.int32)
    sent = buffers.send(buffer)
    buffer[:] = 2
    assert np.array(sent).tolist() == [1] * 1024


class Taken:
    """Stands for a result of the program that took a buffer."""

    def __init__(self) -> None:
        self.waited = False

    def block_until_ready(self) -> None:
        self.waited = True


def test_a_buffer_is_not_written_again_before_its_program_has_ended() -> None:
    uplink = HostBuffers(
        8, NamedSharding(make_mesh(1), PartitionSpec(), memory_kind="pinned_host"), 2
    )
    first, second = Taken(), Taken()
    for taken in (first, second):
        uplink.send(np.zeros(3, np.int32))
        uplink.until(taken)  # type: ignore[arg-type]
    assert not first.waited and not second.waited
    uplink.send(np.zeros(3, np.int32))
    assert first.waited and not second.waited


def test_after_a_failure_no_buffer_of_a_step_in_flight_is_written_again(
    make_engine: Callable[..., Engine],
) -> None:
    runner = make_engine().runner
    before = dict(runner._buffers)
    runner.reset()
    assert {key.program for key in before} > {"update_slots", "copy_pages", "prompt_logprobs"}
    assert all(runner._buffers[key] is not before[key] for key in before)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_a_result_is_read_as_a_copy_that_outlives_it(devices: int, memory: str) -> None:
    sharding = NamedSharding(make_mesh(devices), PartitionSpec(), memory_kind=memory)
    make = jax.jit(lambda x: (x * 2).reshape(2, 3), out_shardings=sharding)
    for dtype in (np.int32, np.float32):
        result = make(np.arange(6, dtype=dtype))
        begin_read(result)
        found = read(result)
        del result
        assert found.dtype == dtype and found.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert memory == "device" or found.flags.owndata


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec(None, "tensor")])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_a_view_is_the_array_and_no_copy_in_pinned_memory_of_one_device(
    devices: int, memory: str, spec: PartitionSpec
) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    sharding = NamedSharding(make_mesh(devices), spec, memory_kind=memory)
    array = jax.device_put(values, sharding)
    assert view(array).tolist() == values.tolist()
    if memory == "pinned_host" and devices == 1:
        assert view(array).ctypes.data == array.unsafe_buffer_pointer()
