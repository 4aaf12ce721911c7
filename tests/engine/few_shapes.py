"""Engines with two forwards, one of the widest decode and one of the largest step, for tests that
are not about shapes: what such a test costs is tracing, lowering and compiling, and the rows of
padding cost nothing. What is equal in two engines is made once: programs, the outline of a model,
and what draws its random weights."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import jax
import pytest

from jaxllm import weights
from jaxllm.engine.runtime.compilation.executables import Executables, Recipe
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup import lattice
from jaxllm.weights import dummy

SHARED = 128  # programs; each takes memory maps, of which a process has few
_build = Buckets.build
_compile = dummy._compile
_outline = functools.cache(weights.outline)
_loader = weights.Loader()


@contextmanager
def few_shapes() -> Iterator[None]:
    """Engines made in here have few shapes, and share the programs that are equal."""
    with pytest.MonkeyPatch.context() as patch, shared():
        patch.setattr(Buckets, "build", _few)
        yield


@contextmanager
def shared() -> Iterator[None]:
    """Engines made in here share the programs that are equal, however many they have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "outline", _outline)
        patch.setattr(weights, "Loader", lambda: _loader)
        patch.setattr(dummy, "_compile", lambda layout, key: _draw(layout))
        patch.setattr(lattice, "Executables", Shared)
        patch.setattr(lattice, "Exports", Facts)
        patch.setattr(
            lattice,
            "fingerprint",
            lambda facts: json.dumps(facts, sort_keys=True, default=str),
        )
        yield


def _few(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
    usual = _build(max_num_seqs, max_num_batched_tokens, platform)
    return replace(
        usual, decode=usual.decode[-1:], extend=usual.extend[-1:], logits=usual.logits[-1:]
    )


@functools.lru_cache(SHARED)
def _draw(layout: dummy._Layout) -> jax.stages.Compiled:
    """One program serves all seeds."""
    return _compile(layout, jax.random.key(0))


class Facts:
    """What programs that are kept between starts depend on, instead of where they are kept."""

    @classmethod
    def open(cls, root: object, facts: str) -> str:
        return facts


class Shared(Executables):
    """Programs that one start would keep for the next, which are the same by their name and the
    facts, are there for every engine."""

    made: ClassVar[OrderedDict[tuple[str, ...], jax.stages.Compiled]] = OrderedDict()

    def __init__(self, options: XlaOptions, facts: str | None, platform: str):
        super().__init__(options, None, platform)
        self.facts = facts

    def compile(self, name: str, rows: int, recipe: Recipe, keep: bool) -> jax.stages.Compiled:
        if not keep or self.facts is None:
            return super().compile(name, rows, recipe, keep)
        key = (self.facts, name, str(self._options.at(name.partition("-")[0], rows)))
        if key not in self.made:
            self.made[key] = super().compile(name, rows, recipe, keep)
            if len(self.made) > SHARED:
                self.made.popitem(last=False)
        return self.made[key]
