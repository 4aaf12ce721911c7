"""What warm-up measured: how many chunk tokens a step may have beside running streams, and what a
token takes. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape
from jaxllm.engine.scheduling.limits import PrefillBudget
from jaxllm.engine.scheduling.plan import Plan

# Of the longest stall wanted: what warm-up timed of a shape leaves out attention to context
STALL_SHARE = 0.85
STEADY_SHARE = 0.28
# When several prompts wait: one step for two takes less than two steps, and the last to come waits
# least
SEVERAL_SHARE = 0.5
SURE = 0.9  # of what chunks add to a step by warm-up


def pace(seconds: Mapping[object, float], stall: float) -> PrefillBudget | None:
    """Chunk tokens that keep a step below `stall` seconds when much waits, below half of it when
    several prompts do and near a quarter when little does, by what the shapes that hold so many
    decode rows took in warm-up. None when nothing was measured."""
    taken = {
        shape: took
        for shape, took in seconds.items()
        if isinstance(shape, ExtendShape) and shape.decodes
    }

    def largest(rows: int, bound: float) -> int:
        wide = {shape: took for shape, took in taken.items() if shape.decodes >= rows}
        return max(
            (s.tokens for s, took in wide.items() if took <= bound),
            default=min(s.tokens for s in wide),
        )

    regions = sorted({shape.decodes for shape in taken})
    steady, several, most = STEADY_SHARE * stall, SEVERAL_SHARE * stall, STALL_SHARE * stall
    bounds = tuple(
        (rows, largest(rows, steady), largest(rows, several), largest(rows, most))
        for rows in regions
    )
    return PrefillBudget(bounds) if bounds else None


def seconds_per_token(seconds: Mapping[object, float]) -> float:
    """What a token of a prompt takes at best, from what warm-up measured; endless when it measured
    nothing."""
    return min(
        (took / shape.tokens for shape, took in seconds.items() if isinstance(shape, ExtendShape)),
        default=float("inf"),
    )


def added_by_chunks(seconds: Mapping[object, float], buckets: Buckets, plan: Plan) -> float | None:
    """Seconds that a step surely takes longer because of its chunks, by what warm-up measured, 0
    when it measured nothing; None for a step without chunks."""
    if not plan.chunks:
        return None
    tokens, rows = sum(chunk.length for chunk in plan.chunks), len(plan.decodes)
    whole = seconds.get(buckets.fit_extend(tokens, len(plan.chunks), rows), 0.0)
    return max(0.0, SURE * (whole - seconds.get(buckets.fit_decode(max(1, rows)), 0.0)))
