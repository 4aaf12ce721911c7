"""One program from a Python function to its executable, by way of what earlier starts have kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.engine.runtime.compilation.exports import Exports, calling, export
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions

PATIENCE = 120  # seconds for another process to lower a program; then it is lowered here


@dataclass(frozen=True)
class Recipe:
    """A program: what is computed, the shapes of its arguments, which of them give their buffers to
    the results, and the results' shardings (a tree of the results' structure, or a prefix of
    it)."""

    function: Callable
    arguments: tuple
    donated: tuple[int, ...]
    out: Any


class Executables:
    """Compiles the programs of one engine, each with the options that its device kind's table
    names. Safe to use from many threads.

    Tracing and lowering are Python and run one at a time, so that the first program is with XLA's
    compiler, which needs no lock, soon.
    """

    def __init__(
        self,
        options: XlaOptions = XlaOptions(),  # noqa: B008, frozen
        exports: Exports | None = None,
        platform: str = "cpu",
    ):
        self._options, self.exports, self.platform = options, exports, platform
        self.coming: dict[str, Future[None]] = {}  # programs that another process is about to keep
        self.hung = False  # whether one of them was waited for in vain
        self._python = threading.Lock()
        self.lowered = 0  # programs that no earlier start had kept, here or in another process

    def compile(self, name: str, rows: int, recipe: Recipe, keep: bool) -> jax.stages.Compiled:
        """The executable of a program. Its name starts with its kind ("decode-…"); `rows` are what
        it computes. With `keep`, which needs a whole tree in `recipe.out`, the lowered program is
        kept for later starts."""
        if (coming := self.coming.get(name)) is not None and not self.hung:
            try:
                coming.result(PATIENCE)
            except TimeoutError:  # workers that hang cost time only, and that once
                self.hung = True
        with self._python:
            function = (
                self._kept(name, recipe) if keep and self.exports is not None else recipe.function
            )
            # Buffers that are only written into are unused inputs: dropped, they would not be
            # donated.
            jitted = jax.jit(
                function, donate_argnums=recipe.donated, out_shardings=recipe.out, keep_unused=True
            )
            lowered = jitted.lower(*recipe.arguments)
        return lowered.compile(compiler_options=self._options.at(name.partition("-")[0], rows))

    def tunes(self, kind: str, rows: int) -> bool:
        """Whether XLA times kernels on the device for the matrix products of a program."""
        return (
            self.platform == "gpu"
            and self._options.at(kind, rows).get("xla_gpu_autotune_level") != 0
        )

    def _kept(self, name: str, recipe: Recipe) -> Callable:
        """The function by way of its kept program, made when there is none; itself where it cannot
        be kept.
        """
        assert self.exports is not None
        program = self.exports.load(name)
        self.lowered += program is None or name in self.coming
        if program is None and self.keep(name, recipe):
            # What was written is read again: the first start then compiles the very program that
            # later ones look up.
            program = self.exports.load(name)
        return recipe.function if program is None else calling(name, program, recipe.out)

    def keep(self, name: str, recipe: Recipe) -> bool:
        """Lower a program and keep it for whoever looks for it; False where it cannot be kept."""
        assert self.exports is not None
        try:
            self.exports.save(name, export(recipe.function, recipe.arguments, self.platform))
        except (ImportError, NotImplementedError, ValueError):
            return False  # a custom call that JAX does not promise to keep stable, say
        return True
