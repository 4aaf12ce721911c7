"""Runs the assembly that makes an operand of the tensor cores on the CPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np


class Lanes:
    """Runs assembly of plain instructions, 128 lanes side by side."""

    def __init__(self, dtype: str):
        self.dtype = np.dtype(dtype) if dtype == "float16" else np.dtype(ml_dtypes.bfloat16)
        self.held: dict[str, np.ndarray] = {"%tid.x": np.arange(256, 384, dtype=np.uint32)}
        self.memory = b""

    def run(self, text: str, arrays: list[Any], outputs: int) -> np.ndarray:
        """The output registers `[128, outputs]`, after the addresses of arrays were given."""
        for i, array in enumerate(arrays):
            self.held[f"${outputs + i}"] = np.full(128, len(self.memory), np.uint32)
            self.memory += np.asarray(array).tobytes()
        for line in re.split(r";\s*", text.strip("{}\n ")):
            if line and not line.startswith("."):
                op, rest = line.split(maxsplit=1)
                self.step(op, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest))
        return np.stack([self.held[f"${i}"] for i in range(outputs)], axis=1)

    def value(self, name: str) -> np.ndarray:
        known = self.held.get(name)
        return np.full(128, int(name, 0), np.uint32) if known is None else known

    def step(self, op: str, given: list[str]) -> None:
        target, *names = given
        if target.startswith("{") and op == "mov.b32":
            for name, half in zip(re.findall(r"\w+", target), (0, 16), strict=True):
                self.held[name] = self.value(names[0]) >> np.uint32(half) & np.uint32(0xFFFF)
            return
        if op.startswith("ld.shared"):
            base, _, offset = names[0].strip("[]").partition("+")
            place = self.value(base) + np.uint32(int(offset))
            if op.endswith("u16"):
                found = np.frombuffer(self.memory, np.uint8)[place[:, None] + np.arange(2)]
                self.held[target] = np.ascontiguousarray(found).view(np.uint16)[:, 0].astype("u4")
                return
            for i, name in enumerate(re.findall(r"\w+", target)):
                index = (place + 4 * i)[:, None] + np.arange(4)
                found = np.frombuffer(self.memory, np.uint8)[index]
                self.held[name] = np.ascontiguousarray(found).view(np.uint32)[:, 0]
            return
        values = [self.value(name) for name in names]
        self.held[target] = self.made(op, *values).astype(np.uint32)

    def made(self, op: str, *v: Any) -> np.ndarray:
        if op.endswith("x2"):
            a, b, *c = (np.ascontiguousarray(x).view(self.dtype).astype(np.float32) for x in v)
            exact = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b}
            got = exact[op[:3]]() if op[:3] in exact else a * b + c[0]
            return got.astype(self.dtype).view(np.uint32)
        if op.endswith("f32") and op.startswith("cvt.rn."):
            pair = np.stack([v[1], v[0]], axis=1).view(np.float32).astype(self.dtype)
            return np.ascontiguousarray(pair).view(np.uint32)[:, 0]
        if op == "cvt.f32.f16":
            return v[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        if op == "mul.rn.f32":
            return (v[0].view(np.float32) * v[1].view(np.float32)).view(np.uint32)
        if op == "prmt.b32":
            pick = v[2][:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
            both = np.stack([v[0], v[1]], axis=1).view(np.uint8)
            assert (pick < 8).all()  # the eighth bit of a byte is not spread
            return np.take_along_axis(both, pick, axis=1).view(np.uint32)[:, 0]
        if op == "lop3.b32":
            a, b, c, table = v
            return (a & b) | (c if table[0] == 0xEA else ~a & c)  # else 0xca
        plain = {
            "mov.b32": lambda: v[0],
            "mov.u32": lambda: v[0],
            "xor.b32": lambda: v[0] ^ v[1],
            "and.b32": lambda: v[0] & v[1],
            "shr.u32": lambda: v[0] >> v[1],
            "shl.b32": lambda: v[0] << v[1],
            "mad.lo.u32": lambda: v[0] * v[1] + v[2],
        }
        return plain[op]()
