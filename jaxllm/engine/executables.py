"""One program from its traced form to its executable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.engine.xla_options import XlaOptions


class Executables:
    """Compiles the programs of one engine, each with the options that its device kind's table names. Safe to use from many threads."""

    def __init__(self, options: XlaOptions):
        self._options = options

    def compile(
        self, kind: str, rows: int, function: Callable, arguments: tuple, donated: tuple[int, ...], out: Any
    ) -> jax.stages.Compiled:
        """The executable of `function(*arguments)`: `arguments` are shapes, `out` the results' shardings, `donated` names the arguments
        whose buffers the results take."""
        # Buffers that are only written into are unused inputs: dropped, they would not be donated.
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=out, keep_unused=True)
        return jitted.lower(*arguments).compile(compiler_options=self._options.at(kind, rows))
