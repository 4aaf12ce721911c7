"""Instructions of lane programs: each emulated one against NumPy, and the assembly of each."""

from __future__ import annotations

import re
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lanes import LANES, Emulated, Ptx, byte_tiled, plain
from pallas_kernels.lanes.emulated import HALF_LIMIT, bits_of, joined
from pallas_kernels.paged_decode import mosaic_lanes
from pallas_kernels.paged_decode.mosaic_flash import Spec, Tuning

RNG = np.random.default_rng(0)
FLOATS = jnp.asarray(RNG.standard_normal(LANES) * 10, jnp.float32)
OTHERS = jnp.asarray(RNG.standard_normal(LANES), jnp.float32)
INTS = jnp.asarray(RNG.integers(0, 2**30, LANES), jnp.int32)


def test_lanes_are_numbered_by_warp_row_and_column_of_fragments() -> None:
    m = Emulated()
    lane = 32 * np.asarray(m.warp) + 4 * np.asarray(m.g) + np.asarray(m.c)
    np.testing.assert_array_equal(lane, np.arange(LANES))
    assert int(m.warp.max()) == 3 and int(m.g.max()) == 7 and int(m.c.max()) == 3


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fadd", lambda a, b: a + b),
        ("fmul", lambda a, b: a * b),
        ("fmax", np.maximum),
        ("add", lambda a, b: a + b),
    ],
)
def test_arithmetic_of_two_registers(name: str, wanted: Any) -> None:
    got = getattr(Emulated(), name)(FLOATS, OTHERS)
    np.testing.assert_array_equal(got, wanted(np.asarray(FLOATS), np.asarray(OTHERS)))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("exp2", np.exp2), ("tanh", np.tanh), ("reciprocal", lambda x: 1 / x)],
)
def test_functions_of_one_register(name: str, wanted: Any) -> None:
    got = getattr(Emulated(), name)(OTHERS)
    np.testing.assert_allclose(got, wanted(np.asarray(OTHERS, np.float64)), rtol=1e-5)


def test_logarithms_and_sums_of_products() -> None:
    m = Emulated()
    positive = jnp.abs(FLOATS) + 0.1
    np.testing.assert_allclose(m.log2(positive), np.log2(np.asarray(positive)), atol=1e-5)
    wanted = np.asarray(FLOATS, np.float64) * np.asarray(OTHERS) + np.asarray(positive)
    np.testing.assert_allclose(m.fma(FLOATS, OTHERS, positive), wanted, atol=1e-5)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 2), (3, 4), (2, 1), (10, 20)])
def test_bits_are_cut_from_the_lowest(first: int, count: int) -> None:
    wanted = (np.asarray(INTS) >> first) % 2**count
    np.testing.assert_array_equal(Emulated().bits(INTS, first, count), wanted)


def test_predicates_choose_lane_by_lane() -> None:
    m = Emulated()
    low, high = m.below(INTS, 2**29), m.below(2**28, INTS)
    chosen = m.select(m.both(low, high), INTS, 0)
    wanted = np.where((np.asarray(INTS) < 2**29) & (np.asarray(INTS) > 2**28), INTS, 0)
    np.testing.assert_array_equal(chosen, wanted)


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16])
def test_a_shuffle_exchanges_lanes_whose_numbers_differ_by_the_mask(mask: int) -> None:
    got = np.asarray(Emulated().shuffle(INTS, mask))
    for lane in range(LANES):
        assert got[lane] == int(INTS[lane ^ mask])
    np.testing.assert_array_equal(Emulated().shuffle(jnp.asarray(got), mask), INTS)


@pytest.mark.parametrize("mask", [4, 8, 16])
def test_shuffles_stay_within_a_warp(mask: int) -> None:
    warps = Emulated().shuffle(Emulated().warp, mask)
    np.testing.assert_array_equal(warps, Emulated().warp)


def test_clamping_keeps_the_range_of_halves_and_nan() -> None:
    given = jnp.full((LANES,), 0.0).at[:4].set(jnp.array([1e9, -1e9, np.nan, 3.0]))
    m = Emulated()
    low, high = m.halves(m.clamped(given, -given))
    np.testing.assert_array_equal(low[:4], [HALF_LIMIT, -HALF_LIMIT, np.nan, 3.0])
    np.testing.assert_array_equal(high[:4], [-HALF_LIMIT, HALF_LIMIT, np.nan, -3.0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pair_of_16_bit_floats_holds_the_low_one_first(dtype: str) -> None:
    m = Emulated()
    word = m.pair(FLOATS, OTHERS, dtype)
    np.testing.assert_array_equal(bits_of(word, jnp.dtype(dtype))[:, 0], FLOATS.astype(dtype))
    low, high = m.halves(word) if dtype == "float16" else m.wide(word)
    np.testing.assert_array_equal(low, FLOATS.astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(high, OTHERS.astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_float_becomes_its_half(dtype: str) -> None:
    m = Emulated()
    every = np.resize(np.arange(256, dtype=np.uint8), (LANES, 4))
    low, high = m.floats(joined(jnp.asarray(every)), dtype)
    got = np.concatenate([bits_of(x, jnp.float16) for x in (low, high)], axis=1)
    wanted = every.view(jnp.dtype(dtype)).astype(np.float16)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("selector", [0x3210, 0x7654, 0x5140, 0x7362, 0x0000])
def test_bytes_are_taken_from_two_registers_by_number(selector: int) -> None:
    a, b = (jnp.asarray(RNG.integers(0, 2**31, LANES), jnp.uint32) for _ in range(2))
    got = np.asarray(bits_of(Emulated().bytes_of(a, b, selector), jnp.uint8))
    eight = np.concatenate([bits_of(x, jnp.uint8) for x in (a, b)], axis=1)
    for i in range(4):
        np.testing.assert_array_equal(got[:, i], eight[:, selector >> 4 * i & 7])


def test_joined_numbers_come_apart_as_they_were() -> None:
    narrow = jnp.asarray(RNG.integers(0, 256, (LANES, 4)), jnp.uint8)
    np.testing.assert_array_equal(bits_of(joined(narrow), jnp.uint8), narrow)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_words_of_a_tile_are_found_where_they_are_stored(width: int) -> None:
    m = Emulated()
    tile = jnp.asarray(RNG.integers(0, 256, (64, width)), jnp.uint8)
    row, chunk = m.add(m.times(m.warp, 16), m.g), width // 16 - 1
    at = m.offset(width, row, m.times(m.c, 4), chunk % 8, chunk // 8)
    for down in (0, 1):
        got = np.asarray(bits_of(m.load(plain(tile, width), at, down), jnp.uint8))
        for lane in range(LANES):
            first = 16 * chunk + 4 * int(m.c[lane])
            wanted = np.asarray(tile)[int(row[lane]) + 8 * down, first : first + 4]
            np.testing.assert_array_equal(got[lane], wanted)


def test_stored_numbers_are_written_to_their_rows_and_nowhere_else() -> None:
    m = Emulated()
    row = m.add(m.times(m.warp, 8), m.g)
    at = m.offset(128, row, m.times(m.bits(m.c, 0, 1), 8), m.bits(m.c, 1, 1), 0)
    m.store((None, 128), at, [FLOATS, OTHERS, FLOATS * 2, OTHERS * 2], "bfloat16")
    out = np.asarray(m.written((40, 64)))
    assert not out[32:].any() and not out[:, 16:].any()
    for lane in range(LANES):
        first = 4 * int(m.c[lane])
        wanted = [FLOATS[lane], OTHERS[lane], FLOATS[lane] * 2, OTHERS[lane] * 2]
        np.testing.assert_array_equal(out[int(row[lane]), first : first + 4], np.array(wanted))


# Assembly


def emitted(name: str, *arguments: Any) -> str:
    """The last line that an instruction writes."""
    m = Ptx(2, 1)
    given = [
        m.inputs[a] if isinstance(a, int) and not isinstance(a, bool) else a for a in arguments
    ]
    getattr(m, name)(*given)
    return m.text([m.inputs[0]]).splitlines()[-3]


@pytest.mark.parametrize(
    ("name", "arguments", "pattern"),
    [
        ("fadd", (0, 1), r"add\.f32 r\d+, r\d+, r\d+;"),
        ("fmul", (0, 1), r"mul\.f32 r\d+, r\d+, r\d+;"),
        ("fma", (0, 1, 1), r"fma\.rn\.f32 (r\d+, ){3}r\d+;"),
        ("fmax", (0, 1), r"max\.f32 r\d+, r\d+, r\d+;"),
        ("exp2", (0,), r"ex2\.approx\.ftz\.f32 r\d+, r\d+;"),
        ("log2", (0,), r"lg2\.approx\.ftz\.f32 r\d+, r\d+;"),
        ("tanh", (0,), r"tanh\.approx\.f32 r\d+, r\d+;"),
        ("reciprocal", (0,), r"rcp\.approx\.ftz\.f32 r\d+, r\d+;"),
        ("clamped", (0, 1), r"cvt\.rn\.satfinite\.f16x2\.f32 r\d+, r\d+, r\d+;"),
        ("transpose", (0,), r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 r\d+, r\d+;"),
        ("below", (0, 1), r"setp\.lt\.s32 p\d+, r\d+, r\d+;"),
    ],
)
def test_an_instruction_is_one_line_of_assembly(
    name: str, arguments: tuple[int, ...], pattern: str
) -> None:
    assert re.fullmatch(pattern, emitted(name, *arguments))


@pytest.mark.parametrize("value", [0.0, 1.5, -65504.0, float("-inf"), 2.0**-126])
def test_floats_in_assembly_are_their_bits(value: float) -> None:
    m = Ptx(0, 1)
    text = m.text([m.constant(value)])
    digits = re.search(r"0f([0-9A-F]{8})", text)
    assert digits and struct.unpack(">f", bytes.fromhex(digits.group(1)))[0] == value


def test_outputs_are_moved_to_the_first_operands_and_inputs_come_after_them() -> None:
    m = Ptx(3, 2)
    text = m.text([m.inputs[2], m.inputs[0]])
    assert re.findall(r"mov\.b32 r\d+, \$(\d)", text) == ["2", "3", "4"]
    assert re.findall(r"mov\.b32 \$(\d), (r\d+);", text) == [
        ("0", m.inputs[2]),
        ("1", m.inputs[0]),
    ]


def test_a_program_with_too_few_outputs_is_refused() -> None:
    with pytest.raises(AssertionError):
        Ptx(1, 2).text(["r1"])


@pytest.mark.parametrize(("width", "piece"), [(64, 64), (128, 128), (256, 128)])
def test_byte_tiles_are_swizzled_in_pieces_of_at_most_128_bytes(width: int, piece: int) -> None:
    tiling, swizzle = byte_tiled(width)
    assert tiling.tiling == (8, piece) and swizzle.swizzle == piece


@pytest.mark.parametrize(("H", "G"), [(64, 1), (128, 8), (128, 16), (256, 7), (256, 16)])
def test_a_warps_state_comes_back_from_its_registers(H: int, G: int) -> None:
    group = 8 if G <= 8 else 16
    size = mosaic_lanes.State.size(H, group)
    registers = list(range(size))
    state = mosaic_lanes.State.of(registers, H, group)
    assert state.registers == registers
    assert len(state.top) == len(state.total) == group // 8
    assert len(state.mixed) == H // 32


@pytest.mark.parametrize(("H", "group", "kept"), [(64, 8, 16), (128, 16, 48), (256, 16, 64)])
def test_offsets_are_kept_where_registers_suffice(H: int, group: int, kept: int) -> None:
    spec = Spec(
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
        tuning=Tuning(),
        interpret=None,
    )
    assert mosaic_lanes.constants(spec) == kept


def public(machine: type) -> set[str]:
    """The instructions of a machine."""
    return {name for name in dir(machine) if not name.startswith("_")}


def test_both_machines_have_the_same_instructions() -> None:
    assert public(Ptx) - {"text"} == public(Emulated) - {"written", "put_down"}


@pytest.mark.parametrize(
    ("name", "operands", "line"),
    [
        ("add", ("r8", 3), "add.s32 r6, r8, 3;"),
        ("times", ("r8", 3), "mul.lo.s32 r6, r8, 3;"),
        ("bits", ("r8", 2, 3), "bfe.u32 r6, r8, 2, 3;"),
        ("fadd", ("r8", 1.0), "add.f32 r6, r8, 0f3F800000;"),
        ("fma", ("r8", 2.0, "r9"), "fma.rn.f32 r6, r8, 0f40000000, r9;"),
        ("fmax", ("r8", "r9"), "max.f32 r6, r8, r9;"),
        ("exp2", ("r8",), "ex2.approx.ftz.f32 r6, r8;"),
        ("log2", ("r8",), "lg2.approx.ftz.f32 r6, r8;"),
        ("tanh", ("r8",), "tanh.approx.f32 r6, r8;"),
        ("reciprocal", ("r8",), "rcp.approx.ftz.f32 r6, r8;"),
        ("constant", (0.5,), "mov.b32 r6, 0f3F000000;"),
    ],
)
def test_an_instruction_is_written_with_its_operands_and_a_new_register(
    name: str, operands: tuple[Any, ...], line: str
) -> None:
    machine = Ptx(0, 1)
    before = machine.text(["r1"]).count(";")
    register = getattr(machine, name)(*operands)
    text = machine.text(["r1"])
    assert line.replace("r6", register, 1) in text.splitlines()
    assert text.count(";") == before + 1
