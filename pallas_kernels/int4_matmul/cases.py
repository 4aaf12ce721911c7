"""Cases of products with 4-bit weights. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_matmul.packed import MIDDLE, TABLES, Int4, values_of, words_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call.

    Attributes:
      tokens: rows of x.
      outputs: rows of the weight.
      inputs: columns of x and of the weight.
      group: columns that share a scale.
      form: "symmetric", "zeros", "offsets", "fp4", "nf4" or "iq4".
    """

    name: str
    tokens: int
    outputs: int
    inputs: int
    group: int = 128
    form: str = "zeros"


CASES = (
    Case(name="one token", tokens=1, outputs=128, inputs=256),
    Case(name="no zero points", tokens=9, outputs=192, inputs=384, group=32, form="symmetric"),
    Case(
        name="offsets, sizes that chunks do not divide",
        tokens=20,
        outputs=100,
        inputs=200,
        group=16,
        form="offsets",
    ),
    Case(name="one group", tokens=3, outputs=64, inputs=512, group=512),
    Case(name="groups of 64, two bands", tokens=300, outputs=320, inputs=192, group=64),
    Case(name="floats", tokens=5, outputs=128, inputs=320, group=32, form="fp4"),
    Case(name="quantiles", tokens=6, outputs=64, inputs=320, group=64, form="nf4"),
    Case(name="steps of IQ4", tokens=7, outputs=64, inputs=320, group=32, form="iq4"),
    Case(name="a wide tile", tokens=130, outputs=256, inputs=640, group=128, form="symmetric"),
)


class Plain(NamedTuple):
    """A weight as numbers `[O, I]` of 0 to 15 and values `[O, G]`; `others` are zero points or
    offsets."""

    numbers: np.ndarray
    scales: np.ndarray
    others: np.ndarray | None


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, Plain]:
    """x and the weight of a case, float32; products are of order 1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.inputs)).astype(np.float32)
    groups = (case.outputs, -(-case.inputs // case.group))
    numbers = rng.integers(0, 16, (case.outputs, case.inputs), dtype=np.uint8)
    typical = 5
    if case.form == "iq4":
        typical = 64
    scales = (rng.random(groups) + 0.5) / (typical * case.inputs**0.5)
    others: dict[str, Any] = {
        "zeros": rng.integers(0, 16, groups).astype(np.float32),
        "offsets": (-8 * scales * rng.random(groups)).astype(np.float32),
    }
    return x, Plain(numbers, scales.astype(np.float32), others.get(case.form))


def packed(case: Case, plain: Plain, dtype: Any) -> Int4:
    """The weight as kernels take it, its values rounded to `dtype`."""

    def values(form: str) -> Any:
        held = None
        if form == "scales":
            held = plain.scales
        elif form == case.form:
            held = plain.others
        if held is None:
            return None
        return jnp.asarray(values_of(held, case.inputs, case.group), dtype)

    words = jnp.asarray(words_of(plain.numbers))
    return Int4(
        words,
        values("scales"),
        values("zeros"),
        values("offsets"),
        case.outputs,
        case.group,
        case.form if case.form in TABLES else None,
    )


def expected(case: Case, x: np.ndarray, plain: Plain, dtype: Any) -> np.ndarray:
    """The product in float64, with values and the weight rounded to `dtype`."""

    def rounded(values: Any) -> np.ndarray:
        return np.asarray(jnp.asarray(values, dtype), np.float64)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(rounded(values), case.group, axis=1)[:, : case.inputs]

    scales = spread(plain.scales)
    others = plain.others
    numbers = plain.numbers.astype(np.float64)
    if case.form in TABLES:
        weight = rounded(TABLES[case.form])[plain.numbers] * scales
    elif case.form == "offsets":
        assert others is not None
        weight = numbers * scales + spread(others)
    else:
        weight = (numbers - (MIDDLE if others is None else spread(others))) * scales
    return x.astype(np.float64) @ rounded(weight.astype(np.float32)).T
