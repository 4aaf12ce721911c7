"""One program from a Python function to its executable, by way of programs that earlier starts
kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.compilation.exports import Exports, calling, export
from jaxllm.engine.runtime.compilation.traces import forget
from jaxllm.engine.runtime.compilation.xla_options import Value, XlaOptions

PATIENCE = 120  # seconds for another process to lower a program; then it is lowered here


@dataclass(frozen=True)
class Recipe:
    """A program to compile.

    Attributes:
        function: the pure function.
        arguments: shapes of its arguments, with shardings.
        donated: arguments that give their buffers to the results.
        out: shardings of the results: a tree of their structure, or a prefix of it.
    """

    function: Callable
    arguments: tuple
    donated: tuple[int, ...]
    out: Any


class Executables:
    """Compiles the programs of one engine, with XLA options by device kind. Safe to use from many
    threads.

    Tracing and lowering are Python and run one at a time. So the first program soon reaches XLA's
    compiler, which needs no lock.

    Attributes:
        exports: lowered programs of earlier starts; None without such a folder.
        platform: target of the programs: "cpu", "gpu" or "tpu".
        coming: programs that another process is about to keep, by name.
        hung: whether one of them did not come in time.
        late: programs that are made while a server serves, by name.
        lowered: programs that no earlier start had kept, made here or in another process.
        compiles: counts compilations.
        late_compiles: counts those of late programs, which are no fault.
    """

    def __init__(
        self,
        options: XlaOptions = XlaOptions(),  # noqa: B008, frozen
        exports: Exports | None = None,
        platform: str = "cpu",
    ):
        self._options = options
        self.exports = exports
        self.platform = platform
        self.coming: dict[str, Future[None]] = {}
        self.hung = False
        self.late: frozenset[str] = frozenset()
        self._python = threading.Lock()
        self.lowered = 0
        self.compiles = CompileCounter()
        self.late_compiles = CompileCounter()

    def compile(self, name: str, rows: int, recipe: Recipe, keep: bool) -> jax.stages.Compiled:
        """The executable of a program.

        Args:
            name: starts with the program's name and a dash ("decode-…").
            rows: rows that it computes.
            keep: keep the lowered program for later starts; needs a whole tree in `recipe.out`.
        """
        if (coming := self.coming.get(name)) is not None and not self.hung:
            try:
                coming.result(PATIENCE)
            except TimeoutError:  # workers that hang cost time once
                self.hung = True
        with self.late_compiles if name in self.late else self.compiles:
            with self._python:
                function = recipe.function
                if keep and self.exports is not None:
                    function = self._kept(name, recipe)
                # Buffers that are only written to are unused inputs; if dropped, they would not be
                # donated
                jitted = jax.jit(
                    function,
                    donate_argnums=recipe.donated,
                    out_shardings=recipe.out,
                    keep_unused=True,
                )
                traced = jitted.trace(*recipe.arguments)
                lowered = traced.lower()
                forget(traced)
            return lowered.compile(compiler_options=self.options(name.partition("-")[0], rows))

    def options(self, program: str, rows: int) -> dict[str, Value]:
        """XLA's options for a program that computes so many rows."""
        found = self._options
        if self.platform == "gpu":
            return found.for_gpus(program, rows)
        return found.at(program, rows)

    def tunes(self, program: str, rows: int) -> bool:
        """Whether XLA times kernels on the device for the matrix products of a program."""
        return (
            self.platform == "gpu"
            and self._options.at(program, rows).get("xla_gpu_autotune_level") != 0
        )

    def _kept(self, name: str, recipe: Recipe) -> Callable:
        """The function by way of its kept program, made when it is missing; the function itself
        where it cannot be kept."""
        assert self.exports is not None
        program = self.exports.load(name)
        self.lowered += program is None or name in self.coming
        if program is None and self.keep(name, recipe):
            # Read back what was written: the first start then compiles the very program that
            # later ones look up
            program = self.exports.load(name)
        if program is None:
            return recipe.function
        return calling(name, program, recipe.out)

    def keep(self, name: str, recipe: Recipe) -> bool:
        """Lower a program and keep it; False where it cannot be kept."""
        assert self.exports is not None
        try:
            self.exports.save(name, export(recipe.function, recipe.arguments, self.platform))
        except (ImportError, NotImplementedError, ValueError):
            return False  # for example a custom call that JAX does not keep stable
        return True
