"""The owner of the inboxes, and the choice of the back end that needs them, on virtual devices."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Group, Inbox, Layout, gather, reference, trial
from pallas_kernels.all_reduce.inboxes import PATIENCE, Inboxes, PeerTimeout
from pallas_kernels.all_reduce.plan import is_one_shot, layout_for
from pallas_kernels.all_reduce.protocol import ERROR, INBOXES, NEVER, POLLS, RANK, TABLE


def mesh(devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]).reshape(1, -1), ("data", "tensor"))


def tables(inboxes: Inboxes) -> np.ndarray:
    return np.array(inboxes.arrays[1]).reshape(-1, TABLE)  # a copy, not a view of the buffer


def pointer(row: np.ndarray, at: int) -> int:
    return int(row[at : at + 2].copy().view(np.uint64)[0])


@pytest.mark.parametrize("devices", [2, 8])
def test_a_table_has_the_rank_and_the_addresses_of_all_inboxes(devices: int) -> None:
    inboxes = Inboxes(mesh(devices), "tensor", layout_for(devices, 4, 1024))
    assert [(a.shape, a.sharding) for a in inboxes.shapes()] == [
        (a.shape, a.sharding) for a in inboxes.arrays
    ]
    shards = sorted(inboxes.arrays[0].addressable_shards, key=lambda shard: shard.index[0].start)
    own = [shard.data.unsafe_buffer_pointer() for shard in shards]
    for rank, row in enumerate(tables(inboxes)):
        assert row[RANK] == rank
        found = [pointer(row, INBOXES + 2 * i) for i in range(devices)]
        assert found == own[rank:] + own[:rank]
        assert ctypes.c_int32.from_address(found[0]).value == NEVER


def test_an_error_word_is_seen_and_gone_after_a_refill_in_place() -> None:
    inboxes = Inboxes(mesh(2), "tensor", layout_for(2, 2, 512))
    assert (tables(inboxes)[:, POLLS] == 1).all()
    inboxes.check()
    rows = tables(inboxes)
    # As a kernel would do
    ctypes.c_int32.from_address(pointer(rows[1], ERROR)).value = 1
    ctypes.c_int32.from_address(pointer(rows[1], INBOXES)).value = 1
    with pytest.raises(PeerTimeout, match="of the 2 devices that add up, 1 waited in vain"):
        inboxes.check()
    inboxes.refill()
    inboxes.check()
    assert (np.asarray(inboxes.arrays[0]) == NEVER).all()
    after = tables(inboxes)
    assert (after[:, POLLS] == PATIENCE).all()
    after[:, POLLS] = rows[:, POLLS]
    np.testing.assert_array_equal(after, rows)


def test_two_shot_begins_where_its_cost_rule_says() -> None:
    assert is_one_shot(2, 2**30)
    assert is_one_shot(4, 339_000) and not is_one_shot(4, 341_000)
    assert is_one_shot(8, 97_000) and not is_one_shot(8, 98_000)
    sizes = layout_for(8, 2048, 8192)
    assert (sizes.one_shot, sizes.two_shot) == (11, 2048)
    assert layout_for(2, 8192, 8192).two_shot == 0
    # A share of a device's memory that sizing can bear
    assert layout_for(2, 8192, 8192).size < 150 * 2**20 > layout_for(8, 2048, 16384).size


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 384), "bfloat16", "multiple of 256 up to 8192, got 384"),
        ((1, 8448), "bfloat16", "multiple of 256 up to 8192, got 8448"),
        ((1, 256), "float32", "bfloat16 or float16, got float32"),
        ((5, 256), "float16", "1 to 4 rows of at most 1024 bytes, got 5 rows of 512"),
        ((1, 1024), "float16", "at most 1024 bytes, got 1 rows of 2048"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_and_left_to_the_reference(
    shape: tuple[int, int], dtype: str, message: str
) -> None:
    from pallas_kernels.all_reduce import mosaic_gpu_peers

    words = jnp.zeros(4, jnp.int32)
    group, part = (
        Group("tensor", 2, Inbox(words, words, Layout(2, 1024, 4))),
        jnp.ones(shape, dtype),
    )
    with pytest.raises(ValueError, match=message):
        mosaic_gpu_peers.check(group, part)
    assert all_reduce.choose(group, part) == "reference"
    fits = jnp.ones((4, 256), jnp.bfloat16)
    assert all_reduce.choose(group, fits) == "mosaic_gpu_peers"
    with pytest.raises(ValueError, match="group with inboxes"):
        gather(words, group=Group("tensor", 2), backend="mosaic_gpu_peers")


class Driver:
    """NVIDIA's driver, for GPUs of which some pairs lack access."""

    def __init__(self, *apart: tuple[int, int]):
        self._apart = apart

    def cuDeviceCanAccessPeer(self, can: Any, a: int, b: int) -> int:
        can._obj.value = (a, b) not in self._apart
        return 0


def test_devices_that_do_not_suit_are_refused_with_the_reason() -> None:
    def gpus(count: int, capability: str = "9.0", processes: int = 1) -> list[Any]:
        return [
            SimpleNamespace(
                compute_capability=capability,
                device_kind="a GPU",
                process_index=i % processes,
                local_hardware_id=i,
            )
            for i in range(count)
        ]

    assert trial.unsuited(gpus(2)) is None
    assert "no kernel" in str(trial.unsuited(gpus(2, "8.0")))
    assert "several processes" in str(trial.unsuited(gpus(4, processes=2)))
    assert "2 to 8 devices" in str(trial.unsuited(gpus(16)))
    assert trial.no_access(gpus(4), Driver()) is None
    found = trial.no_access(gpus(4), Driver((2, 1)))
    assert found == "GPU 2 has no access to the memory of GPU 1"
    assert "no kernel" in str(trial.refusal(mesh(2), "tensor"))
    assert "other axes" in str(trial.refusal(mesh(2), "data"))


def test_a_trial_adds_up_in_both_ways_that_so_many_devices_have() -> None:
    row = 2 * trial.WIDTH
    assert trial.trial_rows(2) == 256  # two devices have one
    for devices in range(3, trial.MOST_DEVICES + 1):
        assert trial.is_one_shot(devices, 3 * row)
        assert not trial.is_one_shot(devices, trial.trial_rows(devices) * row)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_trial_on_cards_is_right(devices: int) -> None:
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} GPUs")
    for _ in range(3):
        assert trial.refusal(mesh(devices), "tensor") is None


def test_a_trial_finds_a_wrong_sum_and_a_device_that_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stand_in(wrong: float) -> Any:
        def add_norm(x: Any, part: Any, weight: Any, eps: float, group: Group, backend: str) -> Any:
            assert backend == "mosaic_gpu_peers"
            return reference.add_norm(x, part * wrong, weight, eps, group)

        return add_norm

    monkeypatch.setattr(trial, "add_norm", stand_in(1.0))
    assert trial.failed_trial(mesh(2), "tensor") is None
    monkeypatch.setattr(Inboxes, "check", lambda self: (_ for _ in ()).throw(PeerTimeout("late")))
    assert trial.failed_trial(mesh(2), "tensor") == "a trial failed: late"
    monkeypatch.undo()
    monkeypatch.setattr(trial, "add_norm", stand_in(1.25))
    assert trial.failed_trial(mesh(2), "tensor") == "a trial gave a wrong sum of 3 rows"
