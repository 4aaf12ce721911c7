"""What a listener is told rebuilds the prefix cache exactly, under random work."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache import events
from jaxllm.cache.events import DEVICE, HOST, KVEventBatch
from jaxllm.kv_events.publisher import as_array
from tests.engine.fake_device import VOCAB
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.kv_event_consumer import Consumer, short

BASE = [(7 * i) % (VOCAB - 1) + 1 for i in range(120)]
SALTS = st.sampled_from([None, None, "salt-1", "salt-2"])
SETUPS = st.builds(
    Setup,
    page_size=st.sampled_from([1, 3, 4]),
    num_pages=st.integers(6, 20),
    windows=st.sampled_from([(None,), (None,), (5,), (4, None)]),
    host_pages=st.sampled_from([0, 5]),
    host_cached=st.sampled_from([2, 5]),
    swaps=st.booleans(),
    unsaved=st.sampled_from([0, 2]),
    delay=st.integers(0, 1),
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 60), st.integers(1, 40), st.integers(1, 30), SALTS),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["forget", "abort", "invalidate", "preempt", "reset"])),
)


class Heard:
    """A loop with a consumer of each form."""

    def __init__(self, setup: Setup):
        host = setup.host_pages if setup.windows == (None,) else 0
        setup.host_pages = host
        self.loop = Loop(setup)
        self.by_form = Consumer(), Consumer()
        self.loop.scheduler.events.listen(self._hear)
        windows = setup.windows
        self.index = self.loop.pools[windows.index(None) if None in windows else 0].index
        assert self.index is not None

    def _hear(self, batch: KVEventBatch) -> None:
        named, array = self.by_form
        named.feed(msgspec.msgpack.encode(batch))
        array.feed(msgspec.msgpack.encode(as_array(batch)))

    def check(self) -> None:
        """What was heard is what is cached."""
        self.loop.scheduler.events.flush()
        offload, host = self.loop.scheduler.offload, set()
        if offload is not None:
            host = {*offload.host._pinned, *offload.host._cached}
        assert self.index is not None
        for consumer in self.by_form:
            held = consumer.blocks
            assert held.get(DEVICE, set()) == short(self.index.pages.values())
            assert held.get(HOST, set()) == short(host)

    def act(self, name: str, *values: int) -> None:
        """One action of a random workload."""
        loop = self.loop
        unfinished = [r for r in loop.requests if r.output and r.status.name == "RUNNING"]
        match name:
            case "add":
                start, length, tokens, salt = values
                request = loop.add(BASE[start : start + length], tokens)
                if request is not None:
                    request.cache_salt = salt  # type: ignore[assignment]
            case "step":
                for _ in range(values[0]):
                    loop.step()
            case "forget":
                loop.forget_prefixes()
            case "preempt":
                loop.preempt_all()
            case "abort" if unfinished:
                loop.abort(unfinished[0])
            case "invalidate" if unfinished:
                loop.invalidate(unfinished[0])
            case "reset":
                loop.in_flight.clear()
                loop.scheduler.reset()


@settings(max_examples=60, deadline=None)
@given(SETUPS, st.lists(ACTIONS, min_size=5, max_size=40))
def test_a_consumer_rebuilds_the_cached_blocks(
    setup: Setup, actions: list[tuple[str, ...]]
) -> None:
    heard = Heard(setup)
    for action in actions:
        heard.act(*action)  # type: ignore[arg-type]
        heard.check()
    heard.loop.drain()
    heard.check()


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(SETUPS, st.lists(ACTIONS, min_size=5, max_size=80))
def test_a_consumer_rebuilds_the_cached_blocks_over_more_work(
    setup: Setup, actions: list[tuple[str, ...]]
) -> None:
    test_a_consumer_rebuilds_the_cached_blocks.hypothesis.inner_test(setup, actions)  # type: ignore[attr-defined]


def test_equal_prompts_under_other_salts_are_told_apart() -> None:
    heard = Heard(Setup(page_size=4, num_pages=40))
    for salt in (None, "salt-1", "salt-2"):
        heard.act("add", 0, 13, 1, salt)  # type: ignore[arg-type]
    heard.loop.drain()
    heard.check()
    (consumer, _) = heard.by_form
    extras = [extra for _, extra in consumer.tokens.values()]
    assert len(consumer.tokens) == 9 and len({str(extra) for extra in extras}) == 3
    assert not any("salt" in str(extra) for extra in extras), "a salt is a secret"


def test_pages_of_one_step_are_one_event_and_long_ones_are_split() -> None:
    heard: list[KVEventBatch] = []
    loop = Loop(
        Setup(page_size=4, num_pages=4000, max_num_batched_tokens=16000, max_model_len=20000)
    )
    loop.scheduler.events.listen(heard.append)
    tokens = [i % 29 + 1 for i in range(3 * events.MAX_ITEMS)]
    loop.add(tokens, 1)
    loop.drain()
    loop.scheduler.events.flush()
    stored = [event for batch in heard for event in batch.events]
    assert [len(event.token_ids) for event in stored] == [events.MAX_ITEMS] * 3  # type: ignore[union-attr]
    assert all(len(batch.events) <= events.MAX_EVENTS for batch in heard)


def test_without_a_listener_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an event is made that nobody hears")

    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch", "KVEvents"):
        monkeypatch.setattr(events, kind, never)
    monkeypatch.setattr("jaxllm.engine.scheduling.kv_manager.tell_stored", never)
    monkeypatch.setattr("jaxllm.engine.scheduling.kv_offload.tell_stored", never)
    loop = Loop(Setup(num_pages=8, host_pages=4, host_cached=4))
    for start in range(0, 60, 10):
        loop.add(BASE[start : start + 20], 8)
    loop.drain()
    loop.forget_prefixes()
    assert loop.scheduler.events._events is None


def test_a_cache_without_prefixes_has_no_events() -> None:
    loop = Loop(Setup(caching=False))
    with pytest.raises(ValueError, match="without prefix caching"):
        loop.scheduler.events.listen(print)
