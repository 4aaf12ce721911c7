"""The gated product whose rows of gate and up alternate, compiled for an H200 that is not here: its
PTX stores each output once, where the copy to device memory takes it from, made of its own sums.

The interpreter knows neither the registers of a thread nor how they are stored transposed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.gated_matmul.mosaic_alternating import OUTPUTS, STRIP, tuning_of
from pallas_kernels.mosaic_gpu import THREADS
from tests.engine.runtime.h200 import COMPILER, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
REPO = Path(__file__).parents[2]
SCRIPT = """
import sys
import jax, jax.numpy as jnp
from pallas_kernels.gated_matmul import SILU
from pallas_kernels.gated_matmul.mosaic_alternating import gated_matmul
from tests.engine.runtime.h200 import _target

rows, outputs, inputs, dtype = *map(int, sys.argv[1:4]), sys.argv[4]
place = jax.sharding.SingleDeviceSharding(_target(1)[0])
x, w = (
    jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)
    for shape in ((rows, inputs), (outputs, inputs))
)
run = jax.jit(lambda x, w: gated_matmul(x, w, SILU))
run.lower(x, w).compile(compiler_options={"xla_gpu_autotune_level": 0})
"""
# Stores of 8 x 8 outputs from all lanes of a warp, transposed, and copies to device memory
STORES = (
    r"stmatrix\S+\.trans\.shared\.b16\s+\[(%\w+)(\+\d+)?\], \{([^}]*)\}"
    r"|(cp\.async\.bulk\.tensor\.4d\.global)"
)
SYMBOL = 1 << 20  # where shared memory begins
OPS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "bfe": lambda a, first, count: a >> first & (1 << count) - 1,
    "cvt": lambda a: a,
    "mad": lambda a, b, c: a * b + c,
    "mov": lambda a: a,
    "mul": lambda a, b: a * b,
    "or": lambda a, b: a | b,
    "shfl": lambda a, *_: np.repeat(a[::32], 32),  # from a warp's first lane
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
}


class Ptx:
    """A kernel's text: what its registers are made of."""

    def __init__(self, text: str, threads: int) -> None:
        self.thread = np.arange(threads)
        self.made: dict[str, list[tuple[str, list[str]]]] = {}
        for line in text.splitlines():
            found = re.match(r"\s*([a-z][\w.:]*)\s+(%\w+), (.*);$", line)
            if found:
                given = [name.strip() for name in found[3].split(",")]
                self.made.setdefault(found[2], []).append((found[1], given))
        sums = re.search(r"wgmma\.mma_async\S+ \{([^}]*)\}", text)
        assert sums is not None
        self.sums = {name.strip(): i for i, name in enumerate(sums[1].split(","))}

    def value(self, name: str) -> np.ndarray:
        """Of each thread; registers that loops change have none."""
        if name == "%tid.x":
            return self.thread
        if not name.startswith("%"):
            number = int(name) if re.fullmatch(r"-?\d+", name) else SYMBOL
            return np.full_like(self.thread, number)
        if name not in self.made:
            return np.zeros_like(self.thread)  # other special registers
        ((op, given),) = self.made[name]
        return OPS[op.split(".")[0]](*map(self.value, given))

    def gate(self, name: str) -> int:
        """The sum that is the gate of an output: the only one in an exponential. The other one is
        of the eighth row below, which PTX has two numbers further."""
        origins = self.origins(name)
        (gate,) = {number for number, in_exponential in origins if in_exponential}
        assert {number for number, _ in origins} == {gate, gate + 2}
        return gate

    def origins(self, name: str, through: tuple[str, ...] = ()) -> set[tuple[int, bool]]:
        """The sums that a register is made of, and whether each went through an exponential."""
        if name in self.sums:
            return {(self.sums[name], any(op.startswith("ex2") for op in through))}
        return {
            origin
            for op, given in self.made.get(name, [])
            for each in given
            for origin in self.origins(each, (*through, op))
        }


def compiled(rows: int, outputs: int, inputs: int, dtype: str) -> str:
    """The kernel's PTX."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    more = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, (rows, outputs, inputs, dtype))],
        env=own | more | {"PYTHONPATH": os.pathsep.join([str(COMPILER), str(REPO)])},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [(544, 37888, 3584, "bfloat16"), (528, 28672, 4096, "float16")],
)
def test_each_output_is_stored_once_where_it_belongs(
    rows: int, outputs: int, inputs: int, dtype: str
) -> None:
    tokens, warpgroups, *_ = tuning_of(rows, outputs, inputs)
    text = compiled(rows, outputs, inputs, dtype)
    ptx = Ptx(text, THREADS * warpgroups)
    assert len(ptx.sums) == tokens // 2
    wg, warp, lane = (ptx.thread // THREADS, ptx.thread % THREADS // 32, ptx.thread % 32)
    output = warp * STRIP + lane // 4
    stored = np.zeros((warpgroups, tokens, OUTPUTS), int)
    first, begins = 0, set()
    for address, offset, names, is_copy in re.findall(STORES, text):
        if is_copy:  # what follows is of later tokens
            first = int((stored == 1).all(axis=(0, 2)).sum())
            continue
        rows_at = ptx.value(address) + int(offset or 0)
        for matrix, name in enumerate(names.split(",")):
            ((_, pair),) = ptx.made[name.strip()]
            for odd, number in enumerate(reversed(pair)):
                token = ptx.gate(number) // 4 * 8 + lane % 4 * 2 + odd
                assert ptx.gate(number) % 4 == odd
                row = ptx.thread // 32 * 32 + matrix * 8 + lane % 4 * 2 + odd
                place = (token - first) * 2 * OUTPUTS + 2 * output
                swizzled = place ^ (place >> 7 & 3) << 4
                begins |= set(zip(wg, rows_at[row] + lane // 4 * 2 - swizzled, strict=True))
                stored[wg, token, output] += 1
    assert (stored == 1).all()
    assert len(begins) == warpgroups, "each has one place, in which 64 bytes are swizzled"
    assert all(begin % 512 == 0 for _, begin in begins)
