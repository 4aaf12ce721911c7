"""Layers with a sliding window: pages behind it are released, and all tokens stay the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.cache.backends import tile_tokens
from jaxllm.cache.pool import Lifetime
from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from pallas_kernels.paged_decode.mosaic_flash import TILE
from pallas_kernels.paged_extend.mosaic_flash import ROWS
from pallas_kernels.paged_extend.mosaic_gpu import default_tuning
from tests.engine.conftest import TINY, Outcome, collect, reading_words
from tests.engine.fake_host import Optimist
from tests.engine.test_random import compare

MakeEngine = Callable[..., Engine]
WINDOW, PAGE, CHUNK = 12, 8, 16
HELD = Lifetime(WINDOW, CHUNK).max_resident(10**6, PAGE)
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
# The same model, with pages kept for host memory
HISTORY: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(0, id="windowed", marks=pytest.mark.slow),
        pytest.param(1, id="hybrid"),  # has layers of both kinds
    ],
)
def windowed(
    request: pytest.FixtureRequest,
    make_engine: MakeEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> MakeEngine:
    """Engines around the tiny model, with a window in its later layers."""
    path = tmp_path_factory.mktemp("windowed")
    window = {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": request.param,
    }
    (path / "config.json").write_text(json.dumps(TINY | window))

    def make(pages: int | None = None, **overrides: Any) -> Engine:
        wishes = {
            "model": str(path),
            "max_num_batched_tokens": CHUNK,
            "max_model_len": 128,
        } | overrides
        # Of the layers with a window; the others hold whole sequences
        if pages is not None:
            wishes["num_gpu_blocks_override"] = (
                pages * -(-wishes["max_model_len"] // PAGE) // HELD if request.param else pages
            )
        return make_engine(**wishes)

    return make


@pytest.fixture(scope="module")
def kept(windowed: MakeEngine) -> Engine:
    """An engine of the same model that keeps all pages."""
    return windowed(**HISTORY)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(96) for _ in range(length)]


def request(name: str, tokens: list[int], params: SamplingParams = GREEDY) -> GenerateRequest:
    return GenerateRequest(id=name, prompt=Prompt(tokens), params=params)


@pytest.mark.slow
def test_a_pool_too_small_for_the_sequence_serves_it_and_little_is_held(
    windowed: MakeEngine, kept: Engine
) -> None:
    small = windowed(pages=HELD)
    assert small.resolved.windows in ((WINDOW,), (None, WINDOW)) and kept.resolved.windows == (
        None,
    )
    assert small.scheduler.pools[-1].num_pages == HELD
    small.add(request("a", prompt(60)))
    deltas, held, written = [], [], []
    while small.has_work:
        deltas += small.step()
        pool = small.scheduler.pools[-1]
        held.append(pool.num_pages - pool.free)
        written += [row.computed for row in small.scheduler._running]
    assert max(held) <= HELD < -(-max(written) // PAGE) and max(written) == 119
    assert max(held[-50:]) <= Lifetime(WINDOW).max_resident(10**6, PAGE), (
        "while it generates, no chunk is to come"
    )
    Outcome.of(deltas, "a").assert_like(Outcome.of(collect(kept, [request("a", prompt(60))]), "a"))


@pytest.mark.slow
def test_a_crowd_that_is_preempted_gets_the_same_as_each_alone(
    windowed: MakeEngine, kept: Engine
) -> None:
    engine = windowed(pages=HELD)
    engine.scheduler.estimator = Optimist()
    requests = [
        request(str(i), prompt(length, seed=i)) for i, length in enumerate((3, 5, 2, 7, 50))
    ]
    found = collect(engine, requests)
    assert engine.stats().preemptions >= 2
    for one in requests:
        Outcome.of(found, one.id).assert_like(Outcome.of(collect(kept, [one]), one.id))
    engine.self_check()
    assert engine.stats().self_check_failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_gives_every_request_what_it_gets_alone_with_all_pages_kept(
    windowed: MakeEngine, seed: int
) -> None:
    crowded = reading_words(windowed(pages=2 * (HELD + 1), max_model_len=96, max_num_seqs=8))
    crowded.scheduler.estimator = Optimist()
    alone = {"async_scheduling": False, "enable_prefix_caching": False} | HISTORY
    quiet, wide = reading_words(windowed(max_num_seqs=1, **alone)), reading_words(windowed(**alone))
    assert min(compare(crowded, quiet, wide, seed, widest=2)) > 0


def test_a_prefix_is_found_by_what_the_next_token_sees_of_it(
    windowed: MakeEngine, kept: Engine
) -> None:
    engine = windowed()
    collect(engine, [request("first", prompt(70))])
    pool = engine.scheduler.pools[-1]
    assert pool.index is not None
    longer = prompt(70) + prompt(9, seed=5)
    early = [pool.index.find(key) for key in hashes(engine, longer)[:7]]
    pool.index.forget(hashes(engine, longer)[:5])
    found = Outcome.of(collect(engine, [request("again", longer)]), "again")
    assert engine.stats().prefix_hits == 64 and all(page is not None for page in early)
    found.assert_like(Outcome.of(collect(kept, [request("again", longer)]), "again"))
    # Token 72 sees the second, 64 both, 48 what was forgotten before
    pool.index.forget(hashes(engine, longer)[6:8])
    collect(engine, [request("late", longer)])
    assert engine.stats().prefix_hits == 64, "no page that is left can be started from"
    assert engine.reset_prefix_cache()
    engine.self_check()
    assert engine.stats().self_check_failures == 0


def hashes(engine: Engine, tokens: list[int]) -> list[bytes]:
    """The hashes of the full pages of a prompt."""
    index, found = engine.scheduler.pools[0].index, list[bytes]()
    assert index is not None
    index.extend(found, tokens)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"n": 3, "seed": 3}, marks=pytest.mark.slow),
        {"n": 2, "best_of": 4, "seed": 4},
        {"use_beam_search": True, "n": 2, "best_of": 3},
    ],
)
def test_choices_and_beams_are_those_of_an_engine_that_keeps_all_pages(
    windowed: MakeEngine, kept: Engine, options: dict
) -> None:
    options = {
        "temperature": 0.0 if "use_beam_search" in options else 1.0,
        "max_tokens": 40,
        "ignore_eos": True,
    } | options
    requests = [
        request(str(i), prompt(length, seed=i), SamplingParams(**options))
        for i, length in enumerate((37, 60))
    ]
    engine = windowed(pages=4 * (HELD + 1))
    engine.scheduler.estimator = Optimist()
    found, expected = collect(engine, requests), collect(kept, requests)
    for one in requests:
        for index in range(one.params.n):
            Outcome.of(found, one.id, index).assert_like(Outcome.of(expected, one.id, index))
    engine.self_check()
    assert engine.stats().self_check_failures == 0


def test_a_page_that_is_lost_in_any_pool_is_found_out_and_all_pools_start_over(
    windowed: MakeEngine, kept: Engine
) -> None:
    engine = windowed()
    expected = Outcome.of(collect(kept, [request("a", prompt(30))]), "a")
    for number, pool in enumerate(engine.scheduler.pools, 1):
        pool.allocate(1)
        engine.self_check()
        assert (
            engine.stats().self_check_failures == number
            and engine.stats().free_pages == engine.stats().num_pages
        )
        Outcome.of(collect(engine, [request("a", prompt(30))]), "a").assert_like(expected)


@pytest.mark.slow
def test_pages_of_8_bits_are_given_back_with_their_scales(windowed: MakeEngine) -> None:
    small = windowed(pages=2 * HELD, kv_cache_dtype="fp8")
    kept = windowed(kv_cache_dtype="fp8", **HISTORY)
    requests = [request(str(i), prompt(40 + i, seed=i)) for i in range(3)]
    found, expected = collect(small, requests), collect(kept, requests)
    for one in requests:
        Outcome.of(found, one.id).assert_like(Outcome.of(expected, one.id))


def test_a_window_as_long_as_the_longest_sequence_is_none(windowed: MakeEngine) -> None:
    assert windowed(max_model_len=WINDOW).resolved.windows == (None,)
    assert windowed(max_model_len=WINDOW + 1).resolved.windows[-1] == WINDOW


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_kernel_reads_more_keys_at_once_than_are_held_back(head_dim: int) -> None:
    assert tile_tokens("mosaic_gpu") >= max(TILE, ROWS * default_tuning(head_dim).groups)
