"""The gated product beside XLA's, with the kernel's place taken by the reference."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from benchmarks import products
from pallas_kernels.gated_matmul import GELU, gated_matmul


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BYTES", 1 << 16)
    monkeypatch.setattr(products, "UNTUNED", {})
    monkeypatch.setattr(
        products,
        "kernel",
        lambda x, w, gating: gated_matmul(x, w, gating=gating, backend="reference"),
    )


def test_every_way_is_timed_at_every_number_of_rows() -> None:
    rows = products.rows_of(products.shape("128x64"), [3, 70], 0.001, GELU)
    assert [(row["rows"], row["how"]) for row in rows] == [
        (m, how) for m in (3, 70) for how in ("xla", "xla untuned", "kernel")
    ]
    assert all(row["us"] > 0 and row["error"] < 0.02 for row in rows)


def test_a_product_that_loses_a_term_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        products,
        "kernel",
        lambda x, w, gating: gated_matmul(
            x.at[:, 0].set(jnp.bfloat16(0)), w, gating=gating, backend="reference"
        ),
    )
    assert products.rows_of((128, 64), [8], 0.001)[-1]["error"] > 0.02
