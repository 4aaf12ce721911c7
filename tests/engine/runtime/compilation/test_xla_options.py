"""XLA options by device kind, program kind and rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.runtime.compilation.executables import Executables, Recipe
from jaxllm.engine.runtime.compilation.xla_options import APART, TUNED, Entry, XlaOptions
from jaxllm.engine.runtime.programs import PROGRAMS

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
UNTUNED = NO_TRITON | {"xla_gpu_autotune_level": 0}
SMALL, LARGE = 1.2e9, 15e9  # bytes of weights


@pytest.mark.parametrize("rows", [64, 160, 256])
def test_decodes_of_large_weights_have_products_of_our_own_and_tune_nothing(rows: int) -> None:
    assert XlaOptions.of("NVIDIA H200", LARGE).at("decode", rows) == UNTUNED
    assert (
        XlaOptions.of("NVIDIA H200", SMALL).at("decode", rows)
        == NO_TRITON
        == XlaOptions.of("NVIDIA H200").at("decode", rows)
    )


@pytest.mark.parametrize("weights", [0, SMALL, LARGE])
def test_the_rest_of_the_h200_table_is_for_all_weights(weights: float) -> None:
    table = XlaOptions.of("NVIDIA H200", weights)
    assert [table.at("extend", rows) for rows in (64, 8448)] == [UNTUNED] * 2
    assert table.at("prompt_logprobs", 256) == UNTUNED
    assert table.at("decode", 192) == NO_TRITON
    assert table.at("prompt_logprobs", 256) == UNTUNED
    assert not any(
        table.at(kind, rows)
        for kind, rows in [
            ("decode", 1),
            ("decode", 16),
            ("decode", 32),
            ("sample", 64),
            ("update_slots", 0),
        ]
    )


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A100-SXM4-80GB", "TPU v5", "../nvidia_h200"])
def test_a_device_kind_that_was_never_measured_gets_no_options(kind: str) -> None:
    assert XlaOptions.of(kind) == XlaOptions()


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"])
def test_a_hopper_card_without_a_table_has_the_h200s(kind: str) -> None:
    assert XlaOptions.of(kind, LARGE) == XlaOptions.of("NVIDIA H200", LARGE) != XlaOptions()


def test_a_table_of_its_own_comes_before_one_that_is_alike(tmp_path: Path) -> None:
    programs = [{"program": "decode", "rows": [1, 8], "options": {"a": True}}]
    for name, alike in (("a_card", ["B"]), ("b_card", [])):
        table = {"programs": programs if alike else [], "alike": alike}
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    assert XlaOptions.of("B Card", folder=tmp_path) == XlaOptions()
    assert XlaOptions.of("B Other", folder=tmp_path).at("decode", 1) == {"a": True}
    assert XlaOptions.of("C", folder=tmp_path) == XlaOptions()


def test_the_first_entry_that_names_a_program_counts(tmp_path: Path) -> None:
    programs = [
        {"program": "decode", "rows": [1, 8], "options": {"a": True}},
        {"program": "decode", "rows": [4, 16], "options": {"b": 2}},
    ]
    (tmp_path / "some_card.json").write_text(json.dumps({"programs": programs}))
    table = XlaOptions.of("Some Card", folder=tmp_path)
    assert [table.at("decode", rows) for rows in (4, 9, 17)] == [{"a": True}, {"b": 2}, {}]


@pytest.mark.parametrize("path", sorted(TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_every_table_names_its_device_and_programs_and_holds_ranges_and_plain_values(
    path: Path,
) -> None:
    table = json.loads(path.read_text())
    assert XlaOptions.of(table["device"]).entries
    assert table["measured"]
    for entry in table["programs"]:
        assert entry["program"] in PROGRAMS
        low, high = entry["rows"]
        assert 0 <= low <= high
        assert all(type(value) in (bool, int, str) for value in entry["options"].values())


def test_a_program_is_compiled_with_its_options_and_takes_its_donated_buffer() -> None:
    def double(into: jax.Array, x: jax.Array) -> jax.Array:
        return x * 2

    like = jax.ShapeDtypeStruct(
        (64,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    executables = Executables(
        XlaOptions((Entry("decode", 1, 8, {"xla_embed_ir_in_executable": True}),)), None, "cpu"
    )
    program = executables.compile(
        "decode-8", 8, Recipe(double, (like, like), (0,), like.sharding), keep=False
    )
    buffer = jnp.zeros(64)
    np.testing.assert_array_equal(program(buffer, jnp.ones(64)), np.full(64, 2.0))
    assert buffer.is_deleted()
    assert program.memory_analysis().alias_size_in_bytes == 256


@pytest.mark.parametrize("rows", [1, 64])
def test_programs_for_gpus_compute_nothing_twice_and_merge_no_weights(rows: int) -> None:
    table = XlaOptions.of("NVIDIA H200")
    found = Executables(table, platform="gpu").options("decode", rows)
    assert found == table.at("decode", rows) | {
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
    assert Executables(table, platform="cpu").options("decode", rows) == table.at("decode", rows)


def test_processes_that_compile_different_programs_do_not_wait_for_each_others_timings() -> None:
    table = XlaOptions.of("NVIDIA H200")
    apart = Executables(replace(table, apart=True), platform="gpu").options("decode", 8)
    together = Executables(table, platform="gpu").options("decode", 8)
    assert apart == together | {"xla_gpu_shard_autotuning": False}
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    known = XlaOptions((Entry("decode", 1, 8, APART),))
    recipe = Recipe(lambda x: x, (like,), (), None)
    Executables(known).compile("decode-8", 8, recipe, keep=False)


def test_an_option_that_xla_does_not_know_is_an_error() -> None:
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    executables = Executables(
        XlaOptions((Entry("decode", 1, 8, {"no_such_option": True}),)), None, "cpu"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        executables.compile("decode-8", 8, Recipe(lambda x: x, (like,), (), None), keep=False)
