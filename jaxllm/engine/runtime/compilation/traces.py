"""What JAX remembers of a program beyond the program's own life."""

from __future__ import annotations

import importlib
from contextlib import suppress

import jax

_LOWERING = "jax._src.interpreters.pxla"
_CALLING = "jax._src.export._export"


def forget(traced: jax.stages.Traced) -> None:
    """Have JAX forget a program that has been lowered.

    Seen in JAX 0.12: a program whose unused arguments stay is in a cache that holds its own key, so
    that neither it nor what is lowered and compiled of it is ever freed, some ten MiB an engine of
    a small model. One that was read from a file is in a cache of shapes. Both entries are of no use
    to a program that is made once; `jax.clear_caches` would drop those of other people, too. Where
    JAX has other caches, this does nothing.
    """
    with suppress(ImportError, AttributeError):
        importlib.import_module(_LOWERING)._dce_jaxpr.evict_weakref(traced.jaxpr)
    with suppress(ImportError, AttributeError):
        importlib.import_module(_CALLING)._call_exported_abstract_eval.cache_clear()
