"""XLA options by device kind, program kind and rows."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.executables import Executables, Recipe
from jaxllm.engine.xla_options import TUNED, Entry, XlaOptions

UNTUNED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


FASTER_WITHOUT_TRITON = dict.fromkeys([("decode", 64), ("decode", 160), ("decode", 256), ("extend", 64), ("extend", 8448)], UNTUNED) | {
    ("decode", 192): {"xla_gpu_enable_triton_gemm": False}
}
AS_XLA_DECIDES = [("decode", 1), ("decode", 16), ("decode", 32), ("sample", 64), ("ingest", 0)]


@pytest.mark.parametrize(("kind", "rows"), [*FASTER_WITHOUT_TRITON, *AS_XLA_DECIDES])
def test_the_h200_table_follows_what_was_measured(kind: str, rows: int) -> None:
    assert XlaOptions.of("NVIDIA H200").at(kind, rows) == FASTER_WITHOUT_TRITON.get((kind, rows), {})


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A100-SXM4-80GB", "TPU v5", "../nvidia_h200"])
def test_a_device_kind_that_was_never_measured_gets_no_options(kind: str) -> None:
    assert XlaOptions.of(kind) == XlaOptions()


def test_the_first_entry_that_names_a_program_counts(tmp_path: Path) -> None:
    programs = [
        {"kind": "decode", "rows": [1, 8], "options": {"a": True}},
        {"kind": "decode", "rows": [4, 16], "options": {"b": 2}},
    ]
    (tmp_path / "some_card.json").write_text(json.dumps({"programs": programs}))
    table = XlaOptions.of("Some Card", tmp_path)
    assert [table.at("decode", rows) for rows in (4, 9, 17)] == [{"a": True}, {"b": 2}, {}]


@pytest.mark.parametrize("path", sorted(TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_every_table_names_its_device_and_holds_ranges_and_plain_values(path: Path) -> None:
    table = json.loads(path.read_text())
    assert XlaOptions.of(table["device"]).entries
    assert table["measured"]
    for entry in table["programs"]:
        low, high = entry["rows"]
        assert 0 <= low <= high
        assert all(type(value) in (bool, int, str) for value in entry["options"].values())


def test_a_program_is_compiled_with_its_options_and_takes_its_donated_buffer() -> None:
    def double(into: jax.Array, x: jax.Array) -> jax.Array:
        return x * 2

    like = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    executables = Executables(XlaOptions((Entry("decode", 1, 8, {"xla_embed_ir_in_executable": True}),)), None, "cpu")
    program = executables.compile("decode-8", 8, Recipe(double, (like, like), (0,), like.sharding), keep=False)
    buffer = jnp.zeros(64)
    np.testing.assert_array_equal(program(buffer, jnp.ones(64)), np.full(64, 2.0))
    assert buffer.is_deleted()
    assert program.memory_analysis().alias_size_in_bytes == 256


def test_an_option_that_xla_does_not_know_is_an_error() -> None:
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    executables = Executables(XlaOptions((Entry("decode", 1, 8, {"no_such_option": True}),)), None, "cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        executables.compile("decode-8", 8, Recipe(lambda x: x, (like,), (), None), keep=False)
