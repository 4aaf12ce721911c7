"""What an operator is told where memory gives too few pages, or fewer than were asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm import models
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.host_memory import HostRoom
from jaxllm.engine.startup.kv_requirements import PAGE_ROUND, pool_pages, splits
from jaxllm.engine.startup.memory_plan import MemoryPlan, first_plan, fit, plan_memory
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.units import GIB, amount
from tests.engine.conftest import TINY
from tests.engine.startup.decisions import decide
from tests.engine.startup.test_memory import CARD, NEED

MIB = 2**20


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

    def smaller(tokens: int, seqs: int) -> MemoryBudget:
        return replace(budget, workspace=budget.workspace * tokens // 8192)

    with pytest.raises(ConfigError) as error:
        plan_memory(config, budget, need, smaller)
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


def test_smaller_steps_are_offered_only_where_one_was_tried_and_fits() -> None:
    budget = replace(CARD, resident=30 * GIB)
    need = replace(NEED, step_tokens=2**20, splits=())
    tried: list[tuple[int, int]] = []

    def offered(least: int) -> str:
        """What is said where steps of at most `least` tokens fit."""

        def smaller(tokens: int, seqs: int) -> MemoryBudget:
            tried.append((tokens, seqs))
            return CARD if tokens <= least else budget

        with pytest.raises(ConfigError) as error:
            plan_memory(EngineConfig(), budget, need, smaller)
        return str(error.value).partition("What helps: ")[2]

    assert offered(2**20) == "--max-num-batched-tokens 131072"
    assert offered(2**16) == "--max-num-batched-tokens 65536"
    assert offered(2**10) == "--max-num-batched-tokens 32 with --max-num-seqs 32"
    assert offered(0) == "a device with more memory, or a smaller model"
    assert tried[-4:] == [(131072, 256), (65536, 256), (32768, 256), (32, 32)]


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


class Steps:
    """A `Measure` of steps that were not compiled: what is expected of them, and what they need
    then."""

    def __init__(self, expected: int, compiled: int):
        self._expected = expected
        self._compiled = compiled
        self.pools: list[int] = []
        self.kept: list[int] = []

    def expected(self, model: ModelPlan, plan: MemoryPlan) -> int:
        """As of `Measure`: in proportion to the tokens of a step."""
        return self._expected * model.limits.max_num_batched_tokens // 16

    def compiled(self, plan: MemoryPlan) -> int:
        """As of `Measure`."""
        self.pools.append(plan.num_pages)
        return self._compiled

    def keep(self, step: int) -> None:
        """As of `Measure`."""
        self.kept.append(step)


def on_a_card(tiny_dir: str, **wishes: Any) -> ModelPlan:
    """The tiny model on a device with 64 MiB of its own."""
    config = EngineConfig(
        model=tiny_dir, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, **wishes
    )
    model = decide(config, tiny_dir).model
    return replace(model, budget=replace(model.budget, usable=64 * MIB, shared=False))


def fitted(model: ModelPlan, steps: Steps) -> MemoryPlan:
    """The pools of a start."""
    return fit(model, first_plan(model), steps)


def test_pools_get_what_the_largest_step_leaves_and_are_compiled_for_once(tiny_dir: str) -> None:
    model = on_a_card(tiny_dir)
    steps = Steps(MIB, MIB)
    plan = fitted(model, steps)
    assert plan.budget == replace(model.budget, workspace=MIB)
    assert 0 <= plan.budget.for_pages - plan.kv_bytes < PAGE_ROUND * plan.need.group_bytes
    assert (steps.pools, steps.kept) == ([plan.num_pages], [MIB])


def test_a_compiled_step_that_needs_more_than_was_expected_sizes_the_pools_once_more(
    tiny_dir: str,
) -> None:
    model = on_a_card(tiny_dir)
    steps = Steps(MIB, 8 * MIB)
    plan = fitted(model, steps)
    assert plan == fitted(model, Steps(8 * MIB, 8 * MIB)) and plan.takes(8 * MIB)
    assert steps.kept == [MIB, 8 * MIB], "the next start knows"
    assert len(steps.pools) == 2 and steps.pools[1] == plan.num_pages < steps.pools[0]


def test_all_hosts_size_their_pools_by_the_largest_need(tiny_dir: str) -> None:
    model = on_a_card(tiny_dir)
    told: list[Any] = []

    def agree(value: Any) -> list[Any]:
        told.append(value)
        return [value, 3 * MIB if len(told) == 1 else 9 * MIB]

    hosts = SimpleNamespace(count=2, agree=agree)
    several = replace(model, wishes=replace(model.wishes, hosts=hosts))
    plan = fitted(several, Steps(MIB, 2 * MIB))
    assert told == [MIB, 2 * MIB, 2 * MIB] and plan.budget.workspace == 9 * MIB


@pytest.mark.parametrize(
    "wishes",
    [{"num_gpu_blocks_override": 40}, {"kv_cache_memory_bytes": 2**20}, {"enforce_eager": True}],
)
def test_pools_whose_size_is_given_are_not_fitted(tiny_dir: str, wishes: dict[str, Any]) -> None:
    model = on_a_card(tiny_dir, **wishes)
    steps = Steps(2**40, 0)
    assert fitted(model, steps) == first_plan(model)
    assert (len(steps.pools), steps.kept) == (1, [])


def test_a_step_that_has_no_room_beside_the_pool_that_was_asked_for_is_told_what_fits(
    tiny_dir: str,
) -> None:
    model = on_a_card(tiny_dir)
    page = model.need.group_bytes
    least = replace(model.budget, workspace=0, spare=0)
    pages = least.for_pages // page
    full = on_a_card(tiny_dir, num_gpu_blocks_override=pages)
    with pytest.raises(ConfigError, match="the largest step needs") as error:
        fitted(full, Steps(MIB, MIB))
    fitting = (least.for_pages - MIB) // page
    says = f"--num-gpu-blocks-override {fitting} (--kv-cache-memory-bytes {fitting * page})"
    assert f"{says}; or leave out --num-gpu-blocks-override {pages}" in str(error.value)
    smaller = on_a_card(tiny_dir, num_gpu_blocks_override=fitting)
    assert fitted(smaller, Steps(MIB, MIB)).num_pages == fitting


def test_a_model_whose_pages_have_no_bytes_is_told_what_helps(tiny_dir: str) -> None:
    """An encoder, or one whose layers all have states."""
    model = on_a_card(tiny_dir)
    model = replace(model, need=replace(model.need, page_bytes=(0,)))
    room = replace(model.budget, workspace=0).for_pages
    with pytest.raises(ConfigError, match="the model has no room") as error:
        fitted(model, Steps(room + MIB, room + MIB))
    assert "1.00 MiB is lacking" in str(error.value)
    assert "What helps: --gpu-memory-utilization" in str(error.value)
    assert "--max-model-len" not in str(error.value), "a shorter one needs as much"
    encoder = replace(model.config, num_gpu_blocks_override=2**14)
    encoder_model = replace(model, wishes=replace(model.wishes, config=encoder))
    with pytest.raises(ConfigError, match="the largest step needs") as error:
        fitted(encoder_model, Steps(2 * room, 2 * room))
    assert "--num-gpu-blocks-override" not in str(error.value)
    asked = EngineConfig(kv_cache_memory_bytes=MIB)
    pages = plan_memory(asked, model.budget, model.need).num_pages
    assert pages == model.need.max_num_seqs * model.need.pages_per_request
    crowded = replace(model.budget, weights=2**40)
    for config in (asked, encoder):
        with pytest.raises(ConfigError, match="is lacking for the rest"):
            plan_memory(config, crowded, model.need)


def test_an_estimate_refuses_only_where_no_step_is_going_to_be_compiled(tiny_dir: str) -> None:
    model = on_a_card(tiny_dir)
    guessed = replace(model.budget, workspace=2**40)
    assert first_plan(replace(model, budget=guessed)).max_model_len == 64
    eager = on_a_card(tiny_dir, enforce_eager=True)
    with pytest.raises(ConfigError, match="of KV cache is needed"):
        first_plan(replace(eager, budget=guessed))
    full = replace(model.budget, weights=2**40)
    with pytest.raises(ConfigError, match="of KV cache is needed"):
        first_plan(replace(model, budget=full))


def test_a_start_tries_smaller_steps_before_it_names_one(tiny_dir: str) -> None:
    config = EngineConfig(
        model=tiny_dir, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=512
    )
    model = decide(config, tiny_dir).model
    model = replace(model, budget=replace(model.budget, usable=64 * MIB, shared=False))
    steps = Steps(3 * MIB, 3 * MIB)  # 96 MiB for 512 tokens
    with pytest.raises(ConfigError, match=r"What helps: --max-num-batched-tokens \d+") as error:
        fitted(model, steps)
    (tokens,) = re.findall(r"--max-num-batched-tokens (\d+)", str(error.value))
    smaller = model.with_steps(int(tokens), 2)
    smaller = replace(smaller, budget=replace(smaller.budget, shared=False))
    assert fitted(smaller, steps).max_model_len == 64


def test_smaller_steps_are_tried_with_the_host_memory_that_is_pinned(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=tiny_dir, max_model_len=64, max_num_seqs=2, preemption_mode="swap", swap_space=0.01
    )
    model = decide(config, tiny_dir).model
    full = HostRoom(0)
    monkeypatch.setattr(HostRoom, "measure", lambda platform: full)
    with pytest.raises(ConfigError, match="pages in host memory need"):
        decide(config, tiny_dir)
    assert model.with_steps(128, 2).host == model.host and model.host.pages > 0
