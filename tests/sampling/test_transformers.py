"""Filters and bad words are those of transformers, over stored reference outputs
(tests/goldens/make_filters.py)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.bits import everything, has, remove
from jaxllm.sampling.constraint import BadWords
from pallas_kernels.draw.reference import apply_filters
from tests.sampling.oracle import kept, make_rows

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "filters.npz"


def cases(result: str) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """What each case asks, its logits [V], and which tokens are left [V]."""
    golden = np.load(GOLDEN)
    yield from zip(
        json.loads(str(golden["cases"])),
        golden["logits"].astype(np.float32),
        golden[result],
        strict=True,
    )


def test_filters_keep_the_tokens_of_transformers_filters_in_the_documented_order() -> None:
    used: dict[frozenset[str], int] = {}
    for case, logits, want in cases("kept"):
        options = case["options"]
        rows = make_rows(1, **options)
        found = jnp.isfinite(
            jax.jit(apply_filters)(logits[None] / rows.temperature_B[:, None], rows)
        )[0]
        np.testing.assert_array_equal(found, want, err_msg=str(options))
        np.testing.assert_array_equal(kept(logits, **options), want, err_msg=str(options))
        used[frozenset(options) - {"temperature"}] = (
            used.get(frozenset(options) - {"temperature"}, 0) + 1
        )
    assert sum(used.values()) == 64
    assert len(used) == 8, "every combination of the three"


def test_the_tokens_that_bad_words_forbid_are_those_of_transformers() -> None:
    forbidden = 0
    for case, _, want in cases("allowed"):
        words, size = case["words"], len(want)
        allowed_W = everything(size)
        for word in words:
            if len(word) == 1:
                remove(allowed_W, word[0])
        constraint = BadWords(tuple(word) for word in words if len(word) > 1)
        for token in case["said"]:
            constraint.accept_tokens([token])
        constraint.apply_mask(allowed_W)
        found = [has(allowed_W, token) for token in range(size)]
        np.testing.assert_array_equal(found, want, err_msg=str(words))
        forbidden += size - sum(found) - len({word[0] for word in words if len(word) == 1})
    assert forbidden > 20, "words of several tokens forbid something"
