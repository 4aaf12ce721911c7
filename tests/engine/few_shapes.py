"""Engines with two forwards, one of the widest decode and one of the largest step, for tests that are not about shapes: what such a test
costs is lowering and compiling, and the rows of padding cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jaxllm.engine import sizing
from jaxllm.engine.buckets import Buckets

_build = Buckets.build


@contextmanager
def few_shapes() -> Iterator[None]:
    """Engines made in here have few shapes, and keep no lowered programs for later starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "build", _few)
        patch.setattr(sizing, "_exports", lambda setup: None)
        yield


def _few(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
    usual = _build(max_num_seqs, max_num_batched_tokens, platform)
    return replace(usual, decode=usual.decode[-1:], extend=usual.extend[-1:], logits=usual.logits[-1:])
