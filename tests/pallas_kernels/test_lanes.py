"""Lane programs: what the emulated machine computes of matrices, and that the assembly of the
programs that run is complete."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lanes import LANES, Emulated, Ptx
from pallas_kernels.lanes.emulated import bits_of, joined
from pallas_kernels.paged_decode import mosaic_lanes as lanes
from pallas_kernels.paged_decode.mosaic_flash import Spec, Tuning

WARPS = LANES // 32


def fragments(x: np.ndarray) -> list[jnp.ndarray]:
    """`[warps, 8 or 16, 16]` float16 as the registers of lanes (g, c): rows g and g + 8, columns
    2c, 2c + 1 and 2c + 8, 2c + 9."""
    pieces = [
        x[:, 8 * r : 8 * r + 8, 8 * s : 8 * s + 8] for s in range(2) for r in range(x.shape[1] // 8)
    ]
    return [joined(jnp.asarray(piece.reshape(LANES, 2))) for piece in pieces]


def test_products_of_fragments_are_products_of_matrices() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((WARPS, rows, 16)).astype(np.float16) for rows in (16, 8))
    m = Emulated()
    out = m.multiply([m.constant(0.0)] * 4, fragments(a), fragments(b))
    wanted = np.einsum("wmk,wnk->wmn", a.astype(np.float64), b.astype(np.float64))
    for i, x in enumerate(out):
        rows, columns = np.asarray(m.g) + 8 * (i // 2), 2 * np.asarray(m.c) + i % 2
        np.testing.assert_allclose(x, wanted[np.asarray(m.warp), rows, columns], atol=1e-5)


def test_a_transposed_fragment_is_that_of_the_transposed_matrix() -> None:
    x = np.arange(WARPS * 64, dtype=np.uint16).reshape(WARPS, 8, 8)
    m = Emulated()
    moved = m.transpose(joined(jnp.asarray(x.reshape(LANES, 2))))
    np.testing.assert_array_equal(bits_of(moved, jnp.uint16).reshape(WARPS, 8, 8), x.swapaxes(1, 2))


def test_bytes_and_halves_come_lowest_first() -> None:
    m = Emulated()
    a, b = (jnp.full((LANES,), x, jnp.uint32) for x in (0x03020100, 0x07060504))
    assert int(m.bytes_of(a, b, 0x5140)[0]) == 0x05010400
    low, high = m.floats(jnp.full((LANES,), 0x40383000, jnp.uint32), "float8_e4m3fn")
    np.testing.assert_array_equal(
        bits_of(jnp.stack([low[0], high[0]]), jnp.float16), [[0, 0.5], [1, 2]]
    )


@pytest.mark.parametrize(
    ("H", "G", "kv", "softcap"),
    [
        (64, 1, "float8_e5m2", None),
        (128, 7, "float8_e4m3fn", 20.0),
        (256, 16, "float8_e4m3fn", None),
    ],
)
def test_every_register_of_the_assembly_is_declared_and_written_before_it_is_read(
    H: int, G: int, kv: str, softcap: float | None
) -> None:
    spec = Spec(
        B=3,
        K=2,
        N=2 * G,
        G=G,
        tiles=1,
        H=H,
        C=64,
        group=8 if G <= 8 else 16,
        dtype=jnp.dtype("bfloat16"),
        kv_dtype=kv,
        scale=0.1,
        window=100,
        softcap=softcap,
        tuning=Tuning(),
        interpret=None,
    )
    size, queries = lanes.State.size(H, spec.group), lanes.constants(spec)
    m = Ptx(5 + queries + size, size)
    tile = lanes.Tile((m.inputs[0], H), (m.inputs[1], H), (m.inputs[2], 64))
    state = lanes.State.of(m.inputs[5 + queries :], H, spec.group)
    text = m.text(
        lanes.fold(
            m, spec, tile, (m.inputs[3], m.inputs[4]), m.inputs[5 : 5 + queries], state
        ).registers
    )
    assert sorted({int(x) for x in re.findall(r"\$(\d+)", text)}) == list(
        range(5 + queries + 2 * size)
    )
    counts = {kind: int(count) for kind, count in re.findall(r"\.reg \.\w+ ([rhp])<(\d+)>;", text)}
    written: set[str] = set()
    for line in text.splitlines()[4:-1]:
        op, rest = line.rstrip(";").split(" ", 1)
        names = re.findall(r"\b[rhp]\d+\b", rest)
        results = (
            0
            if op.startswith("st.")
            else len(re.findall(r"\b[rhp]\d+\b", rest[: rest.index("}")]))
            if rest.startswith("{")
            else 1
        )
        if rest.startswith("$"):
            results = 0
        assert set(names[results:]) <= written, line
        written |= set(names[:results])
        assert all(int(name[1:]) < counts[name[0]] for name in names)
    assert text.count("mma.sync") == H // 16 * 2 * (spec.group // 8)
