"""Decisions before anything is loaded, and the pool once the largest step is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup import memory
from jaxllm.engine.startup import resolve as module
from jaxllm.engine.startup.kv_requirements import KVRequirements
from jaxllm.engine.startup.memory import MemoryBudget, expected_workspace_bytes
from jaxllm.engine.startup.plan_memory import MARGIN_SHARE, first_plan
from jaxllm.engine.startup.resolve import resolve
from jaxllm.engine.startup.sizing import with_workspace
from jaxllm.mesh import make_mesh
from jaxllm.models import make_spec
from jaxllm.quantisation import ONLINE
from jaxllm.units import GIB
from tests.engine.conftest import TINY
from tests.targets import H200
from tests.weights.packed import write
from tests.weights.test_grouped import pair


def test_a_smaller_step_leaves_a_larger_pool_and_changes_nothing_else(tiny_dir: str) -> None:
    config = EngineConfig(
        model=tiny_dir, max_model_len="auto", max_num_seqs=4, max_num_batched_tokens=64
    )
    before = resolve(config, weights.ModelFiles(tiny_dir), [make_mesh(1)])
    budget = before.memory.budget
    tight = with_workspace(
        before, config, budget.workspace + budget.for_pages - 20 * before.need.group_bytes
    )
    assert tight.resolved.num_pages == 20
    assert (
        tight.resolved.max_model_len
        == 20 * tight.resolved.page_size
        < before.resolved.max_model_len
    )
    assert tight.memory.budget.for_pages - 20 * before.need.group_bytes == 0
    assert with_workspace(tight, config, budget.workspace) == before


def test_a_pool_that_was_asked_for_keeps_its_size(tiny_dir: str) -> None:
    config = EngineConfig(
        model=tiny_dir, num_gpu_blocks_override=50, max_num_seqs=4, max_num_batched_tokens=64
    )
    before = resolve(config, weights.ModelFiles(tiny_dir), [make_mesh(1)])
    assert (
        with_workspace(before, config, before.memory.budget.workspace // 2).resolved
        == before.resolved
    )


def test_an_estimate_refuses_only_where_no_step_is_going_to_be_compiled() -> None:
    need = KVRequirements(page_bytes=(GIB // 64,), page_size=64, max_num_seqs=4, max_model_len=4096)
    # 7 GiB is a guess, 1 GiB of pages is needed
    budget = MemoryBudget(usable=10 * GIB, weights=4 * GIB, workspace=7 * GIB, shared=False)
    plan = first_plan(EngineConfig(max_model_len=4096), budget, need)
    assert (plan.max_model_len, plan.budget) == (4096, budget)
    with pytest.raises(ConfigError, match=r"1\.00 GiB of KV cache is needed"):
        first_plan(EngineConfig(max_model_len=4096, enforce_eager=True), budget, need)
    full = replace(budget, weights=10 * GIB)
    with pytest.raises(ConfigError, match=r"1\.00 GiB of KV cache is needed"):
        first_plan(EngineConfig(max_model_len=4096), full, need)


def likely_bytes(rows: int) -> int:
    return expected_workspace_bytes(make_spec(TINY), rows, 16, 4, 1)


@pytest.mark.parametrize(
    ("usable", "wishes", "length", "likely"),
    [
        (2**20, {}, 4096, True),
        (450_000, {}, 1536, True),  # what fits is shorter
        (300_000, {}, 512, False),  # nothing fits, unless a step needs less
        (2**20, {"max_model_len": 64}, 64, True),  # all layers are of one kind
        (2**20, {"batch_invariant": True}, 4096, True),
        (2**20, {"num_gpu_blocks_override": 600}, 4096, False),
        (2**20, {"kv_cache_memory_bytes": 2**19}, 3664, False),
        (2**20, {"enforce_eager": True}, 4096, False),
    ],
)
def test_on_hopper_the_pool_that_is_likely_is_the_one_that_a_step_of_that_need_leaves(
    usable: int,
    wishes: dict[str, Any],
    length: int,
    likely: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hybrid = {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(TINY | hybrid | {"max_position_embeddings": 4096})
    )
    choose = module.choose_backend
    monkeypatch.setattr(
        module, "choose_backend", lambda *given: replace(choose(*given), name="mosaic_gpu")
    )
    monkeypatch.setattr(module, "target_of", lambda mesh: H200)
    monkeypatch.setattr(
        memory,
        "MemoryBudget",
        lambda **found: MemoryBudget(**(found | {"usable": usable, "shared": False, "spare": 0})),
    )
    usual: dict[str, Any] = {
        "max_model_len": "auto",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "block_size": 8,
    }
    config = EngineConfig(model=str(tmp_path), **(usual | wishes))
    setup = resolve(config, weights.ModelFiles(tmp_path), [make_mesh(1)])
    budget = setup.memory.budget
    assert (setup.resolved.max_model_len, budget.expected) == (length, likely)
    if likely:
        # Prompts run apart from decodes where nothing may depend on other requests
        need = likely_bytes(16 if "batch_invariant" in wishes else 16 + 2)
        without = replace(budget, workspace=need).for_pages
        assert budget.workspace == need + without // MARGIN_SHARE
        found = with_workspace(setup, config, budget.workspace)
        assert (found.resolved, found.memory.budget) == (
            setup.resolved,
            replace(budget, expected=False),
        )


def test_packed_weights_count_as_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made, settings), meshes = pair("llama-gqa", "gptq of 8 bits"), [make_mesh(1)]
    packed = write(tmp_path / "a", made.config | {"quantization_config": settings}, made.packed)
    plain = write(tmp_path / "b", made.config, made.plain)
    config = EngineConfig(dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=64)
    # This format is held as it is and takes less; it stands for those that are not
    monkeypatch.setattr("jaxllm.weights.weight_formats", lambda *given: {})
    found, expected = (
        resolve(config, weights.ModelFiles(path), meshes).memory.budget for path in (packed, plain)
    )
    assert found.weights == expected.weights == 2 * sum(x.size for x in made.plain.values())
    (packed / "model.safetensors").unlink()  # nothing is read before memory is refused
    monkeypatch.setattr(memory, "usable_bytes", lambda *given: found.weights - 1)
    message = r"is lacking for the rest .* weights unpacked from gptq: 8 bits .*helps"
    with pytest.raises(ConfigError, match=message):
        resolve(config, weights.ModelFiles(packed), meshes)


@pytest.mark.parametrize(
    ("activation", "wish", "shards", "products"),
    [
        ("silu", None, 1, 1),
        ("silu", None, 2, 1),
        ("gelu", None, 2, 2),
        ("silu", "fp8", 1, 2),
        ("silu", "int4", 1, 3),
        ("silu", "int8", 1, 5),
        ("silu", "fp8_w8a16", 1, 5),
    ],
)
def test_both_products_of_a_feed_forward_are_expected_where_no_kernel_makes_one_of_them(
    activation: str, wish: str | None, shards: int, products: int
) -> None:
    formats = {} if wish is None else {"model.layers.0.mlp.up_proj": ONLINE[wish]}
    small, large = (
        replace(
            make_spec(TINY | {"hidden_act": activation, "intermediate_size": inner}),
            formats=formats,
        )
        for inner in (2**20, 2**21)
    )
    sizes = [expected_workspace_bytes(spec, 16, 1, 2, shards) for spec in (small, large)]
    assert sizes[1] - sizes[0] == 16 * 2 * products * 2**20 // shards


@pytest.mark.parametrize(
    ("role", "platform", "tokens"),
    [
        (None, "gpu", 8192),
        ("kv_both", "gpu", 8192),
        ("kv_producer", "gpu", 2048),
        ("kv_producer", "cpu", 512),
    ],
)
def test_steps_of_who_sends_pages_are_short(role: str | None, platform: str, tokens: int) -> None:
    """Pages of a step travel while the next one runs."""
    transfer = None if role is None else {"kv_role": role}
    config = EngineConfig(max_model_len=16384, kv_transfer_config=transfer)
    spec = make_spec(TINY | {"max_position_embeddings": 16384})
    assert module._limits(config, spec, platform).max_num_batched_tokens == tokens
    wish = replace(config, max_num_batched_tokens=4096)
    assert module._limits(wish, spec, platform).max_num_batched_tokens == 4096
