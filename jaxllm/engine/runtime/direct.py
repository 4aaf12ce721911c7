"""Calls of compiled programs without JAX's look at each argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def direct(program: jax.stages.Compiled) -> Callable[..., Any]:
    """What calls `program`, for arguments like those of a call that JAX has checked.

    JAX compares the type and place of every argument with what was compiled, at every call: half of
    a launch that takes a few hundred arrays. An engine's arrays never change theirs. Uses parts of
    JAX that it does not promise to keep; where they are missing, or the program needs more of JAX,
    the answer is `program`.
    """
    try:
        inner = program._executable.unsafe_call
        execute = inner.xla_executable.execute_sharded
        handlers, arguments = inner.out_handler.handlers, program._params
        plain = not (
            inner.ordered_effects
            or inner.has_unordered_effects
            or inner.has_host_callbacks
            or inner.mut
            or arguments.const_args
            or arguments.is_high
        )
        every = len(inner.kept_var_idx) == program.in_tree.num_leaves
        unflatten = program.out_tree.unflatten
    except AttributeError:
        return program
    if not (plain and every) or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return program
    leaves = jax.tree.leaves

    def call(*arrays: Any) -> Any:
        return unflatten(execute(leaves(arrays)).consume_with_handlers(handlers))

    return call
