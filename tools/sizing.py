"""Which models fit which cards: the table of docs/sizing.md, by the arithmetic of `jaxllm check`.

Nothing is compiled, so the largest step counts with its upper estimate, and a start, which measures
it, gives the pool some more.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm import weights
from jaxllm.config import EngineConfig
from jaxllm.engine.startup.budget import SPARE
from jaxllm.engine.startup.model_plan import ModelPlan, plan_model
from jaxllm.engine.startup.wishes import Wishes
from jaxllm.mesh import make_mesh
from jaxllm.models import Wish, read_spec
from jaxllm.units import GIB

SHARE = 0.9  # the default of --gpu-memory-utilization
# GiB that the driver leaves of cards, by what is printed on them
CARDS: Mapping[str, float] = MappingProxyType(
    {
        "24 GB": 23.5,
        "32 GB": 31.4,
        "40 GB": 39.4,
        "48 GB": 44.4,
        "80 GB": 79.2,
        "141 GB": 139.8,
        "180 GB": 178.4,
    }
)
# Rows: what is shown, the shape of benchmarks/shapes.py, and --quantization
MODELS = (
    ("Llama 3.2 1B", "llama-3.2-1b", None),
    ("Qwen2.5 7B", "qwen2.5-7b", None),
    ("Llama 3.1 8B", "llama-3.1-8b", None),
    ("Llama 3.1 8B", "llama-3.1-8b", "fp8"),
    ("Qwen3 30B-A3B", "qwen3-30b-a3b", None),
    ("Qwen3 30B-A3B", "qwen3-30b-a3b", "fp8"),
    ("Llama 3.1 70B", "llama-3.1-70b", "fp8"),
    ("Llama 3.1 70B", "llama-3.1-70b", "int4"),
)
# What an accelerator takes by default, where a CPU takes less
LIKE_A_GPU: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "bfloat16",
        "block_size": 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    }
)


def plan_of(shape: str, quantization: str | None) -> ModelPlan:
    """What a start with default options on one GPU decides of a shape, before its pool has a
    size."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(ALWAYS | SHAPES[shape]))
        config = EngineConfig(
            model=directory, load_format="dummy", quantization=quantization, **LIKE_A_GPU
        )
        spec = read_spec(Path(directory), Wish.of(config))
        wishes = Wishes(config, weights.ModelFiles(Path(directory)), spec)
        with wishes.files:
            return plan_model(wishes, [make_mesh(1, jax.devices("cpu"))])


def pool_tokens(plan: ModelPlan, memory: float) -> int:
    """Tokens of the KV pool on a card of so many GiB; 0 where the rest does not fit."""
    budget = replace(plan.budget, usable=int(memory * SHARE * GIB), spare=SPARE, shared=False)
    if budget.for_pages <= 0:
        return 0
    return plan.need.pages_in(budget.for_pages) * plan.page_size


def cell(tokens: int) -> str:
    """A number of tokens, by two figures and rounded down."""
    if not tokens:
        return "no"
    if tokens < 1000:
        return "< 1k"
    thousands = tokens // 1000
    step = 10 ** max(0, len(str(thousands)) - 2)
    return f"{thousands // step * step:,}k"


def table() -> str:
    """A row per model: its weights, the KV of a token, and the tokens that each card's pool has."""
    lines = [
        f"| model | weights, GiB | KV of a token, KiB | {' | '.join(CARDS)} |",
        "|---" * (3 + len(CARDS)) + "|",
    ]
    for name, shape, quantization in MODELS:
        plan = plan_of(shape, quantization)
        shown = name if quantization is None else f"{name}, `{quantization}`"
        token = plan.need.bytes_of(plan.need.pages_in(GIB)) / plan.need.pages_in(GIB)
        cells = [
            shown,
            f"{plan.budget.weights / GIB:.1f}",
            f"{token / plan.page_size / 1024:.0f}",
            *(cell(pool_tokens(plan, memory)) for memory in CARDS.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
