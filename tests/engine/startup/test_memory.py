"""How many pages fit, and what each cache group gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cache.groups import CacheGroup
from jaxllm.cache.layer import PagedKV
from jaxllm.cache.pool import Lifetime
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.budget import SPARE, MemoryBudget, resident_bytes
from jaxllm.engine.startup.kv_requirements import PAGE_ROUND, KVRequirements, fitting_length
from jaxllm.engine.startup.memory_plan import plan_memory
from jaxllm.sampling.process import logits_params_bytes
from jaxllm.units import GIB
from tests.engine.conftest import TINY

CARD = MemoryBudget(usable=24 * GIB, weights=15 * GIB, workspace=3 * GIB, shared=False)


NEED = KVRequirements(
    page_bytes=(8 * 2**20,),
    page_size=64,
    max_num_seqs=256,
    max_model_len=32768,
    splits=(2, 4, 8),
)


def test_an_accelerator_gives_all_that_is_left_in_whole_rounds_of_pages() -> None:
    plan = plan_memory(EngineConfig(), CARD, NEED)
    assert plan.num_pages == 6 * GIB // NEED.group_bytes // PAGE_ROUND * PAGE_ROUND
    assert 0 <= CARD.for_pages - plan.kv_bytes < PAGE_ROUND * NEED.group_bytes


def test_every_term_takes_from_the_pool_and_is_named() -> None:
    full = replace(CARD, resident=GIB, spare=GIB // 2, staged=GIB // 4)
    assert CARD.for_pages - full.for_pages == GIB + GIB // 2 + GIB // 4
    assert full.breakdown == (
        "24.00 GiB usable − 15.00 weights − 3.00 for the largest step − 1.00 for sampling "
        "− 0.50 spare − 0.25 for pages on their way to or from the host"
    )


def test_a_7b_on_an_h200_gets_more_than_98_percent_of_the_tokens_that_vllm_gets() -> None:
    # Qwen2.5-7B: the client's limit at 0.9 of the card, its weights, 1.24 GiB for the largest step,
    # the lattice's logits.
    logits = resident_bytes(Buckets.build(256, 8192, "gpu").logits, 256, 152064, 1)
    budget = MemoryBudget(
        int(125.82 * GIB),
        int(14.19 * GIB),
        int(1.24 * GIB),
        shared=False,
        resident=logits,
        spare=SPARE,
    )
    need = KVRequirements(
        page_bytes=(57344 * 64,), page_size=64, max_num_seqs=256, max_model_len=32768
    )
    assert plan_memory(EngineConfig(), budget, need).num_pages * 64 >= 2_002_963


@pytest.mark.parametrize(("vocab", "share"), [(104, 4), (103, 1)])
def test_devices_share_the_logits_of_a_vocabulary_that_divides(vocab: int, share: int) -> None:
    assert (
        resident_bytes((16, 64), 8, vocab, 4) - logits_params_bytes(8, vocab)
        == (80 * vocab * 4 * 2 + 9 * vocab * 2) // share
    )


def test_what_stays_for_sampling_is_what_the_programs_take(
    make_engine: Callable[..., Engine],
) -> None:
    runner = make_engine().runner
    for rows in runner.shapes.buckets.logits:
        runner.call(Key("process_logits", (rows,)))
    sampling = ("counts", "logits_params", "processed_logits", "forward_output")
    found = sum(
        x.nbytes
        for (name, _), tree in runner._device._arrays.items()
        if name in sampling
        for x in jax.tree.leaves(tree.logits if name == "forward_output" else tree)
    )
    assert found == resident_bytes(
        runner.shapes.buckets.logits, runner.slots, TINY["vocab_size"], 1
    )


def test_a_host_gives_no_more_than_the_requests_at_once_can_use() -> None:
    budget = MemoryBudget(usable=64 * GIB, weights=GIB, workspace=0, shared=True)
    need = KVRequirements(page_bytes=(2**16,), page_size=16, max_num_seqs=4, max_model_len=1000)
    assert plan_memory(EngineConfig(), budget, need).num_pages == 256  # 4 × 63 pages, rounded


@given(st.integers(1, 64), st.integers(1, 40), st.booleans())
def test_the_length_that_auto_finds_always_fits(usable: int, page_mib: int, shared: bool) -> None:
    budget = MemoryBudget(usable=usable * GIB, weights=GIB, workspace=GIB // 2, shared=shared)
    need = replace(NEED, page_bytes=(page_mib * 2**20,))
    length = fitting_length(EngineConfig(), budget, need)
    if length == 0:
        with pytest.raises(ConfigError):
            plan_memory(EngineConfig(), budget, replace(need, max_model_len=1))
    else:
        assert plan_memory(
            EngineConfig(), budget, replace(need, max_model_len=length)
        ).num_pages >= -(-length // need.page_size)


def test_layers_with_a_window_need_pages_for_what_a_step_sees_and_no_more() -> None:
    need = replace(NEED, groups=windowed(4096), tile=128, step_tokens=8192)
    assert need.pages_per_request == -(-(4096 + 128 + 8192 - 3) // 64) + 1 < NEED.pages_per_request
    assert replace(need, max_model_len=700).pages_per_request == 11
    tight = replace(CARD, usable=CARD.weights + CARD.workspace + 256 * NEED.group_bytes)
    assert plan_memory(EngineConfig(), tight, need).num_pages == 256 < NEED.pages_per_request
    assert fitting_length(EngineConfig(), tight, need) == 32768
    with pytest.raises(ConfigError, match="the longest that fits is 8192 tokens"):
        plan_memory(EngineConfig(num_gpu_blocks_override=128), tight, need)
    assert fitting_length(EngineConfig(num_gpu_blocks_override=128), tight, need) == 128 * 64


def windowed(*windows: int | None) -> tuple[CacheGroup, ...]:
    """Cache groups with these windows."""
    return tuple(CacheGroup(PagedKV(1, 1, 1, window), ()) for window in windows)


HYBRID = replace(
    NEED,
    page_bytes=(8 * 2**20, 3 * 2**20),
    groups=windowed(None, 4096),
    tile=128,
    step_tokens=8192,
)


def test_every_group_has_pages_for_the_longest_requests_and_windows_up_to_a_third_more() -> None:
    full, windowed = HYBRID.group_pages_per_request
    assert (full, windowed) == (512, -(-(4096 + 128 + 8192 - 3) // 64) + 1)
    plan = plan_memory(EngineConfig(), CARD, HYBRID)
    _, more = HYBRID.group_pages(plan.num_pages)
    longest = full * HYBRID.page_bytes[0] + windowed * 3 * 2**20
    assert more / windowed >= plan.num_pages / full
    assert (more - windowed) * 3 * 2**20 == pytest.approx((plan.kv_bytes - longest) / 3, rel=0.01)
    assert (
        plan.kv_bytes == plan.num_pages * HYBRID.page_bytes[0] + more * 3 * 2**20 <= CARD.for_pages
    )
    assert CARD.for_pages - plan.kv_bytes < PAGE_ROUND * HYBRID.group_bytes
    assert (
        plan_memory(EngineConfig(kv_cache_memory_bytes=plan.kv_bytes), CARD, HYBRID).num_pages
        == plan.num_pages
    )


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([64, 4096, 20000]),
    st.booleans(),
)
def test_the_length_that_auto_finds_fits_all_kinds_of_layers(
    tenths: int, first: int, second: int, window: int, shared: bool
) -> None:
    budget = MemoryBudget(usable=GIB + tenths * GIB // 10, weights=GIB, workspace=0, shared=shared)
    need = replace(
        HYBRID, page_bytes=(first * 2**20, second * 2**20), groups=windowed(None, window)
    )
    length = fitting_length(EngineConfig(), budget, need)
    if length:
        need = replace(need, max_model_len=length)
        plan = plan_memory(EngineConfig(), budget, need)
        assert (
            plan.num_pages >= need.group_pages_per_request[0]
            and need.group_pages(plan.num_pages)[1:] >= need.group_pages_per_request[1:]
        )
        assert plan.kv_bytes <= budget.for_pages
    else:
        with pytest.raises(ConfigError):
            plan_memory(EngineConfig(), budget, replace(need, max_model_len=1))


@given(
    st.integers(1, 40000),
    st.integers(1, 20000),
    st.integers(1, 40),
    st.integers(0, 10000),
    st.integers(1, 400),
)
def test_short_requests_lack_no_window_unless_windows_have_a_third_and_the_longest_need_no_more(
    length: int, window: int, size: int, beyond: int, short: int
) -> None:
    need = replace(
        HYBRID,
        max_model_len=length,
        groups=windowed(None, window),
        page_bytes=(HYBRID.page_bytes[0], size * 2**20),
    )
    first, held = need.group_pages_per_request
    assert need.group_pages(first) == (first, held)
    pages, steady = first + beyond, Lifetime(window, tile=need.tile).decode_bound(need.page_size)
    _, more = need.group_pages(pages)
    at_once = min(need.max_num_seqs, pages // short)
    assert steady is not None
    used = (at_once - 1) * min(short, steady) + min(short, held) if at_once else 0
    share = (
        (more + 1 - held)
        * size
        * 2**20
        / (need.bytes_of(pages) + size * 2**20 - need.bytes_of(first))
    )
    assert (
        pages * held <= more * first
        and more <= pages
        and (more >= min(used, pages) or share >= 1 / 3)
    )


@given(st.integers(0, 2**36), st.integers(1, 2**24), st.integers(1, 2**24), st.integers(1, 40000))
def test_as_many_pages_are_made_as_their_bytes_hold(
    size: int, first: int, second: int, length: int
) -> None:
    need = replace(HYBRID, page_bytes=(first, second), max_model_len=length)
    assert need.bytes_of(need.pages_in(size)) <= size < need.bytes_of(need.pages_in(size) + 1)


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(1, 20),
    st.integers(0, 200),
)
def test_what_a_step_reads_and_writes_fits_the_pages_that_a_request_holds_at_once(
    window: int, tile: int, chunk: int, size: int, position: int
) -> None:
    kind = Lifetime(window, chunk, tile)
    behind, held = kind.out_of_window(position, size), kind.max_resident(10**6, size)
    first = max(0, position - window + 1)
    assert behind * size <= first // tile * tile, "a tile that is partly seen is held"
    assert (behind + held) * size >= position + chunk
