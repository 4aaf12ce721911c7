"""An engine publishes what its prefix cache holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.cache.events import DEVICE
from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect
from tests.engine.scheduling.kv_event_consumer import Consumer, short
from tests.kv_events.test_publisher import Subscriber

PROMPTS = [[i % 90 + 1 for i in range(start, start + 40)] for start in (0, 7, 0, 50)]


def test_a_subscriber_knows_the_blocks_of_an_engine(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    engine = make_engine(num_gpu_blocks_override=16, kv_events_config=config)
    settings = KVEventSettings.read(config)
    assert settings is not None
    subscriber, seen = Subscriber(settings), 0
    consumer = Consumer()

    def hear() -> None:
        nonlocal seen
        for number, payload in subscriber.replay(seen):
            assert number == seen
            consumer.feed(payload)
            seen += 1

    ((number, first),) = subscriber.replay(0)
    assert number == 0 and b"AllBlocksCleared" in first, "an engine begins with an empty cache"
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    collect(
        engine,
        [
            GenerateRequest(id=str(number), prompt=Prompt(prompt), params=params)
            for number, prompt in enumerate(PROMPTS)
        ],
    )
    hear()
    index = engine.scheduler.pools[0].index
    assert index is not None and len(index) > 3
    assert consumer.blocks[DEVICE] == short(index.pages.values())
    assert engine.reset_prefix_cache()
    hear()
    assert not any(consumer.blocks.values()), "an idle engine tells it at once"
    subscriber.close()


def test_a_missing_prefix_cache_is_refused_before_anything_is_loaded(
    make_engine: Callable[..., Engine],
) -> None:
    config = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="prefix caching is off"):
        make_engine(kv_events_config=config, enable_prefix_caching=False)
