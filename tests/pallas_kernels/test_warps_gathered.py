"""What the warps of decode over 8-bit pages leave, gathered: the assembly and the emulated machine
against NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lanes import LANES, Emulated
from pallas_kernels.lanes.emulated import Words
from pallas_kernels.mosaic_flash import LOG2E, NEVER
from pallas_kernels.paged_decode import mosaic_lanes as lanes
from pallas_kernels.paged_decode.mosaic_flash import Spec, Tuning
from pallas_kernels.paged_decode.mosaic_peers import PAD
from tests.pallas_kernels.assembly import Assembly

STALE = 7.0  # in what is to be written


def spec_of(H: int, group: int, consumers: int) -> Spec:
    return Spec(
        B=1,
        K=1,
        N=group,
        G=group,
        tiles=1,
        H=H,
        C=64,
        group=group,
        dtype=jnp.dtype("bfloat16"),
        kv_dtype="float8_e4m3fn",
        scale=1.0,
        window=None,
        softcap=None,
        tuning=Tuning(consumers=consumers),
        interpret=None,
    )


def run(machine: str, program: Any, arrays: list[np.ndarray], scalars: list[Any]) -> None:
    """Runs `program(machine, arrays, scalars)`, which changes the arrays."""
    if machine == "assembly":
        count = len(arrays)
        bits = [np.asarray(x, np.float32 if isinstance(x, float) else np.int32) for x in scalars]
        Assembly(arrays, []).run(
            lambda m, given: program(m, given[:count], given[count:]) or [],
            [int(x.view(np.int32)) for x in bits],
        )
        return
    held = [Words(jnp.asarray(array)) for array in arrays]
    program(Emulated(), held, scalars)
    for array, own in zip(arrays, held, strict=True):
        array[...] = np.asarray(own.array)


SIZES = [(64, 8, 1), (128, 8, 2), (128, 16, 1), (256, 16, 1)]


@pytest.mark.parametrize("machine", ["assembly", "emulated"])
@pytest.mark.parametrize(("H", "group", "consumers"), SIZES)
@pytest.mark.parametrize("sinks", [False, True])
def test_sums_of_warps_are_added_by_their_maxima(
    machine: str, H: int, group: int, consumers: int, sinks: bool
) -> None:
    spec, rng, warps = spec_of(H, group, consumers), np.random.default_rng(0), 4 * consumers
    sums = rng.standard_normal((warps * group, H + PAD)).astype(np.float32)
    tops = rng.standard_normal((warps * group, 2)).astype(np.float32) * 3
    tops[:, 1] = np.abs(tops[:, 1])
    none = slice(group, 2 * group)  # a warp that has seen nothing
    sums[none], tops[none] = 0, (NEVER, 0)
    kept = [np.full((n, *more), STALE, np.float32) for n, *more in ((group, H + PAD), (group,))]
    kept.append(kept[1].copy())
    logits = [float(x) for x in rng.standard_normal(group - 1)] if sinks else []
    run(
        machine,
        lambda m, refs, given: lanes.gather(
            m, spec, tuple(refs[:2]), tuple(refs[2:]), (given[2:], given[0], given[1])
        ),
        [sums, tops, *kept],
        [1, 1, *logits],
    )

    top_WG, total_WG = (tops[:, i].reshape(warps, group).astype(np.float64) for i in range(2))
    sink = np.full(group, NEVER)
    sink[1 : 1 + len(logits)] = np.array(logits) * LOG2E
    top = np.maximum(top_WG.max(axis=0), sink)
    weight = np.exp2(top_WG - top)
    total = (weight * total_WG).sum(axis=0) + np.exp2(sink - top)
    mixed = (weight[..., None] * sums.reshape(warps, group, -1)).sum(axis=0)
    np.testing.assert_allclose(kept[0][:, :H], mixed[:, :H], atol=1e-5)
    assert (kept[0][:, H:] == STALE).all()
    np.testing.assert_allclose(kept[1], top, rtol=1e-6)
    np.testing.assert_allclose(kept[2], total, rtol=1e-5)


@pytest.mark.parametrize("machine", ["assembly", "emulated"])
def test_sinks_that_another_block_counts_are_left_out(machine: str) -> None:
    spec = spec_of(64, 8, 1)
    sums, tops = np.zeros((32, 64 + PAD), np.float32), np.ones((32, 2), np.float32)
    kept = [np.zeros((8, 64 + PAD), np.float32), *np.zeros((2, 8), np.float32)]
    run(
        machine,
        lambda m, refs, given: lanes.gather(
            m, spec, tuple(refs[:2]), tuple(refs[2:]), (given[2:], given[0], given[1])
        ),
        [sums, tops, *kept],
        [0, 0, *[50.0] * 8],
    )
    np.testing.assert_array_equal(kept[1], np.ones(8))
    np.testing.assert_array_equal(kept[2], np.full(8, 4.0))


@pytest.mark.parametrize("machine", ["assembly", "emulated"])
@pytest.mark.parametrize(("H", "group", "consumers"), SIZES)
def test_a_warp_leaves_its_sums_by_query_and_column(
    machine: str, H: int, group: int, consumers: int
) -> None:
    spec = spec_of(H, group, consumers)
    sums = np.full((4 * group, H + PAD), STALE, np.float32)
    tops = np.full((4 * group, 2), STALE, np.float32)
    lane = np.arange(LANES)
    warp, g, c = lane // 32, lane // 4 % 8, lane % 4

    def value(query: Any, column: Any) -> Any:
        """Sums of (warp, query, column) differ from each other."""
        return 1000 * warp + 256 * (query % 16) / 16 + column

    wanted = []
    for block in range(H // 32):
        for half in range(2):
            for n in range(group // 8):
                wanted += [
                    value(8 * n + 2 * c + i, 32 * block + 4 * g + 2 * half + j)
                    for j in range(2)
                    for i in range(2)
                ]
    for what in (0, 1):  # maxima, then totals of each g
        for n in range(group // 8):
            wanted += [100.0 * what + 10 * warp + 8 * n + 2 * c + i for i in range(2)]
    registers = np.stack(wanted).astype(np.float32)

    def program(m: Any, refs: list[Any], _: Any) -> None:
        given = refs[2] if machine == "emulated" else None
        state = [
            jnp.asarray(row)
            if given is not None
            else m.word(refs[2], m.add(m.times(m.warp, 32), m.add(m.lane, LANES * i)))
            for i, row in enumerate(registers)
        ]
        lanes.leave(m, spec, (refs[0], refs[1]), lanes.State.of(state, H, group))

    run(machine, program, [sums, tops, registers.copy()], [])
    for w in range(4):
        for query in range(group):
            row = w * group + query
            column = 1000 * w + 16 * query + np.arange(H)
            np.testing.assert_allclose(sums[row, :H], column)
            assert (sums[row, H:] == STALE).all()
            np.testing.assert_allclose(tops[row], [10 * w + query, 8 * (100 + 10 * w + query)])


@pytest.mark.parametrize("machine", ["assembly", "emulated"])
def test_without_tiles_nothing_counts(machine: str) -> None:
    kept = [np.full(n, STALE, np.float32) for n in ((8, 128 + PAD), (8,), (8,))]
    run(machine, lambda m, refs, _: lanes.clear(m, spec_of(128, 8, 2), tuple(refs)), kept, [])
    assert not kept[0][:, :128].any() and not kept[2].any() and (kept[1] == np.float32(NEVER)).all()
