"""What an operator is told where memory gives too few pages, or fewer than were asked for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm import models
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.memory import MemoryBudget
from jaxllm.engine.startup.plan_memory import first_plan, plan_memory, pool_pages, splits
from jaxllm.engine.startup.sizing import workspace_to_reserve
from jaxllm.units import GIB, amount
from tests.engine.conftest import TINY
from tests.engine.startup.test_memory import CARD, NEED


def test_too_little_memory_names_what_is_needed_what_there_is_and_what_helps() -> None:
    with pytest.raises(ConfigError) as error:
        plan_memory(
            EngineConfig(gpu_memory_utilization=0.6), replace(CARD, workspace=8 * GIB), NEED
        )
    text = str(error.value)
    assert "\n" not in text
    assert all(
        part in text
        for part in (
            "4.00 GiB",
            "1.00 GiB is available",
            "--max-model-len",
            "--gpu-memory-utilization",
            "auto",
        )
    )


def test_a_step_that_needs_a_little_more_than_expected_leaves_the_pool_that_was_planned() -> None:
    budget = first_plan(EngineConfig(), replace(CARD, spare=0), NEED, 2**28).budget
    margin = budget.workspace - 2**28
    assert 0 < margin <= budget.for_pages // 200, "it costs at most half a hundredth of the tokens"
    for need in (2**28, budget.workspace):
        assert workspace_to_reserve(budget, need) == budget.workspace
    assert workspace_to_reserve(budget, budget.workspace + 1) == budget.workspace + 1


@pytest.mark.parametrize(
    "asked", [{"num_gpu_blocks_override": 10**9}, {"kv_cache_memory_bytes": 10**13}]
)
def test_a_pool_larger_than_memory_is_refused(asked: dict) -> None:
    with pytest.raises(ConfigError, match=r"6\.00 GiB is available"):
        plan_memory(EngineConfig(**asked), CARD, NEED)


@given(st.integers(17, 23), st.integers(0, 6), st.sampled_from([1000, 8192, 32768]), st.booleans())
def test_every_value_that_an_error_names_would_have_helped(
    usable: int, workspace: int, length: int, shared: bool
) -> None:
    budget = MemoryBudget(
        usable=usable * GIB, weights=15 * GIB, workspace=workspace * GIB, shared=shared
    )
    need = replace(NEED, max_model_len=length, max_num_seqs=16, step_tokens=8192)
    config = EngineConfig(gpu_memory_utilization=0.5)
    if pool_pages(config, budget, need) >= need.pages_per_request:
        return
    with pytest.raises(ConfigError) as error:
        plan_memory(config, budget, need)
    found = dict(re.findall(r"--([a-z-]+) ([0-9.]+)", str(error.value).partition("What helps")[2]))
    times = int(found.get("tensor-parallel-size", 1))
    if times > 1:
        split = replace(need, page_bytes=tuple(-(-size // times) for size in need.page_bytes))
        plan_memory(config, replace(budget, weights=budget.weights // times), split)
    else:
        assert shared
    if "max-model-len" in found:
        plan_memory(config, budget, replace(need, max_model_len=int(found["max-model-len"])))
        with pytest.raises(ConfigError):
            plan_memory(
                config, budget, replace(need, max_model_len=int(found["max-model-len"]) + 1)
            )
    if "gpu-memory-utilization" in found:
        share = float(found["gpu-memory-utilization"])
        plan_memory(config, replace(budget, usable=int(budget.usable * share / 0.5)), need)
    if "max-num-batched-tokens" in found:
        plan_memory(
            config,
            replace(
                budget, workspace=budget.workspace * int(found["max-num-batched-tokens"]) // 8192
            ),
            need,
        )


@pytest.mark.parametrize(
    "asked", [{"num_gpu_blocks_override": 10}, {"kv_cache_memory_bytes": 10**8}]
)
def test_a_pool_that_was_asked_too_small_is_told_the_size_that_does(asked: dict) -> None:
    with pytest.raises(ConfigError, match="What helps") as error:
        plan_memory(EngineConfig(**asked), CARD, NEED)
    (name,) = asked
    (value,) = re.findall(
        rf"--{name.replace('_', '-')} (\d+)", str(error.value).partition("What helps")[2]
    )
    assert (
        plan_memory(EngineConfig(**{name: int(value)}), CARD, NEED).num_pages
        == NEED.pages_per_request
    )


@pytest.mark.parametrize(
    ("asked", "budget", "says"),
    [
        (
            {"num_gpu_blocks_override": 10},
            CARD,
            "--num-gpu-blocks-override 10 gives 80.00 MiB; the longest that fits is 640 tokens",
        ),
        (
            {"kv_cache_memory_bytes": 10**8},
            CARD,
            "--kv-cache-memory-bytes 100000000 gives 88.00 MiB; "
            "the longest that fits is 704 tokens",
        ),
        (
            {},
            replace(CARD, weights=19 * GIB),
            "2.00 GiB is available "
            "(24.00 GiB usable − 19.00 weights − 3.00 for the largest step); the",
        ),
        (
            {},
            replace(CARD, weights=23 * GIB),
            "2.00 GiB is lacking for the rest (24.00 GiB usable − 23.00 weights − 3.00",
        ),
        (
            {"max_model_len": "auto"},
            replace(CARD, weights=21 * GIB),
            "of up to 64 tokens, 0.50 GiB of KV cache is needed, but 0.00 GiB",
        ),
    ],
)
def test_what_there_is_is_what_the_terms_sum_up_to_or_what_was_asked_for(
    asked: dict, budget: MemoryBudget, says: str
) -> None:
    need = replace(NEED, max_model_len=1) if "max_model_len" in asked else NEED
    with pytest.raises(ConfigError) as error:
        plan_memory(EngineConfig(**asked), budget, need)
    assert says in str(error.value)
    assert ("no length fits. What helps" in str(error.value)) == (budget.for_pages <= 0)


def test_devices_are_offered_where_they_help_and_no_more_than_that() -> None:
    def offered(budget: MemoryBudget, **asked: int) -> list[str]:
        with pytest.raises(ConfigError) as error:
            plan_memory(EngineConfig(**asked), budget, NEED)
        return re.findall(r"--tensor-parallel-size (\d+)", str(error.value))

    assert offered(CARD, num_gpu_blocks_override=10) == [], (
        "there would be ten pages on each device"
    )
    assert offered(CARD, kv_cache_memory_bytes=10**8) == []
    assert offered(CARD, kv_cache_memory_bytes=3 * GIB) == ["2"]
    assert offered(CARD, kv_cache_memory_bytes=GIB) == ["4"]
    assert offered(replace(CARD, weights=20 * GIB)) == ["2"]
    assert offered(replace(CARD, weights=40 * GIB)) == ["4"]
    assert offered(replace(CARD, weights=400 * GIB)) == []
    assert offered(replace(CARD, weights=20 * GIB, shared=True)) == []


@pytest.mark.parametrize(
    ("heads", "shards", "times"),
    [
        ((28, 4), 1, (2, 4)),
        ((28, 4), 4, ()),
        ((32, 8), 1, (2, 4, 8)),
        ((32, 8), 4, (2,)),
        ((6, 3), 1, ()),
    ],
)
def test_devices_are_offered_over_which_heads_divide(
    heads: tuple[int, int], shards: int, times: tuple[int, ...]
) -> None:
    hf = TINY | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8}
    assert splits(models.make_spec(hf), shards) == times
    with pytest.raises(ConfigError) as error:
        plan_memory(EngineConfig(), replace(CARD, weights=40 * GIB), replace(NEED, splits=times))
    assert ("--tensor-parallel-size 4," in str(error.value)) == (4 in times)


def test_what_nothing_helps_is_said_to_need_another_device() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no length fits\. What helps: a device with more memory, or a smaller model$",
    ):
        plan_memory(EngineConfig(), replace(CARD, weights=400 * GIB), NEED)


def test_who_asks_for_steps_that_are_too_large_is_told_so() -> None:
    budget, need = replace(CARD, resident=30 * GIB), replace(NEED, step_tokens=2**20, splits=())
    with pytest.raises(
        ConfigError,
        match=r"What helps: lower --max-num-batched-tokens \(1048576\) or --max-num-seqs \(256\)$",
    ):
        plan_memory(EngineConfig(), budget, need)


@pytest.mark.parametrize(
    "asked", [{"num_gpu_blocks_override": 400}, {"kv_cache_memory_bytes": 400 * NEED.group_bytes}]
)
def test_a_pool_that_is_too_large_where_the_largest_is_too_small_is_told_what_else_helps(
    asked: dict,
) -> None:
    budget = replace(CARD, weights=18 * GIB)  # 3 GiB are left, 4 GiB are needed
    with pytest.raises(
        ConfigError, match=r"leave it out, with --max-model-len (\d+) \(or auto\); or --gpu-memory"
    ) as error:
        plan_memory(EngineConfig(**asked, gpu_memory_utilization=0.5), budget, NEED)
    (longest,) = re.findall(r"--max-model-len (\d+)", str(error.value))
    plan_memory(EngineConfig(), budget, replace(NEED, max_model_len=int(longest)))


@given(st.integers(1, 2**45))
def test_more_never_looks_like_less(size: int) -> None:
    def value(text: str) -> float:
        number, unit = text.split(" ")
        return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[unit]

    assert value(amount(size)) >= size > value(amount(size - 1, down=True)) - 1
    assert amount(size) != amount(size - 1, down=True)


@pytest.mark.parametrize(
    "asked", [{"num_gpu_blocks_override": 10**9}, {"kv_cache_memory_bytes": 10**13}]
)
def test_a_pool_that_was_asked_too_large_is_told_the_most_that_fits(asked: dict) -> None:
    with pytest.raises(ConfigError, match="ask for at most") as error:
        plan_memory(EngineConfig(**asked), CARD, NEED)
    (name,) = asked
    (value,) = re.findall(rf"--{name.replace('_', '-')} (\d+)", str(error.value))
    assert (
        0
        <= CARD.for_pages - plan_memory(EngineConfig(**{name: int(value)}), CARD, NEED).kv_bytes
        < NEED.group_bytes
    )
