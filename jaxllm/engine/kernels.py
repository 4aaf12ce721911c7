"""Mosaic GPU kernels compiled before the programs that hold them.

XLA's own code generator and Mosaic's set different options of LLVM, which are global, so each waits until nobody uses the other
(LLVMCommandLineOptionsLock in XLA). Programs compiled side by side that hold both kinds of kernels spend most of their time in that
queue. A kernel is compiled once a process and found again by its hash: compiled alone first, programs only find them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

TARGET = "mosaic_gpu_v2"
_CALL = re.compile(rf'custom_call @{TARGET}\(.*?kernel_hash = "((?:[^"\\]|\\.)*)", module = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)")
_NAMED = {b"n": b"\n", b"t": b"\t"}

type Kernels = dict[bytes, bytes]  # hash → module


def kernels_in(text: str) -> Kernels:
    """The kernels that a program calls, from its MLIR text."""
    return {_unescaped(name): _unescaped(module) for name, module in _CALL.findall(text)}


def _unescaped(literal: str) -> bytes:
    """The bytes of an MLIR string: two hexadecimal digits after a backslash are a byte."""
    return _ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else _NAMED.get(m[1], m[1]), literal.encode())


class KernelCompiler:
    """Compiles kernels, each once. Safe to use from many threads; two that ask for one kernel both wait for it."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._locks: dict[bytes, threading.Lock] = {}
        self._lock = threading.Lock()
        self._done: set[bytes] = set()

    def compile(self, kernels: Kernels) -> None:
        """Compile what is not compiled yet, as programs that call nothing else and never run."""
        for name, module in kernels.items():
            with self._lock:
                mine = self._locks.setdefault(name, threading.Lock())
            with mine:
                if name not in self._done:
                    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the program that holds it will say what is wrong
                        self._compile(name, module)
                    self._done.add(name)

    def alone(self, name: bytes, module: bytes) -> Callable[[], jax.Array]:
        """A function that calls a kernel with no arguments: it is compiled from its module alone."""
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))
        return lambda: call(kernel_hash=name, module=module, use_custom_barrier=False)

    def _compile(self, name: bytes, module: bytes) -> None:
        jax.jit(self.alone(name, module), out_shardings=self._sharding).lower().compile()
