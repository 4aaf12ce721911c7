"""Which cases of the attention ops run in every run: each shape, option and edge once. The others,
their neighbours and combinations, are marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SLOW = {
    "one token",  # "ragged", and chunks after a prefix, have one of a single token
    "one prompt",
    "ragged prompts",
    "one long row among short ones",
    "a short chunk after a long prefix",
    "MHA",
    "MQA",
    "pages of 64",
    "pages of 128",
    "small heads",
    "heads of 80",  # values narrower than keys make heads of 24
    "window wider than anything",
    "window with pages of 64",
    "softcap",
    "sinks",  # with a window there are
    "sinks, window and softcap",
    "sinks, groups of seven, pages of 64",
}


def covering(cases: Iterable[Any], *before: Any) -> list[Any]:
    """Parameters of a test: the cases, each after `before`, those in SLOW marked slow."""
    marks = {name: [pytest.mark.slow] for name in SLOW}
    return [
        pytest.param(
            *before, case, id="-".join((*before, case.name)), marks=marks.get(case.name, [])
        )
        for case in cases
    ]
