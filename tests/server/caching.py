"""A fake engine with seats and a prefix cache, and a server over several of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from jaxllm.cache.events import KVEventBatch, KVEvents
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.config import EngineConfig
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.server.state import Settings
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control, FakeEngine
from tests.server.harness import SETTINGS, Running

SEATS = 8


class CachingEngine(FakeEngine):
    """Runs SEATS requests at once, the oldest; finds the pages of requests that have ended.

    `pages` is the size of its cache, `seconds` what a step takes.
    """

    def __init__(
        self,
        config: EngineConfig,
        control: Control,
        tokenizer: Tokenizer | None,
        pages: int = 1 << 20,
        seconds: float = 0.0,
    ):
        super().__init__(config, control, tokenizer)
        self.resolved = replace(
            self.resolved, max_num_queued_reqs=1000, max_model_len=4096, group_pages=(1024,)
        )
        self.index = PrefixIndex(self.resolved.page_size, b"fake")
        self.start = self.index.start
        self.requests: list[str] = []
        self._pages, self._seconds = pages, seconds
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # the least lately used first
        self._next_page = 0

    def listen(self, listener: Callable[[KVEventBatch], None]) -> None:
        self.index.events = KVEvents(self.resolved.page_size)
        self.index.events.listeners.append(listener)

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self.requests.append(request.id)
        tokens, size = request.prompt.tokens, self.index.page_size
        keys: list[bytes] = []
        self.index.extend(keys, tokens, self.index.root(request.cache_salt, None))
        hits = len(self.index.match(keys, (len(tokens) - 1) // size))
        self.index.count(len(tokens), hits * size)
        for key in keys[:hits]:
            self._cached.move_to_end(key)
        for at in range(hits, len(keys)):
            self._store(keys[at], keys[at - 1] if at else None)

    def _store(self, key: bytes, parent: bytes | None) -> None:
        if len(self._cached) == self._pages:
            self.index.evict(self._cached.popitem(last=False)[1])
        if self.index.register(key, self._next_page):
            self._cached[key] = self._next_page
            self._next_page += 1
            if self.index.events is not None:
                self.index.events.stored([key], parent, [])

    def step(self) -> list[TextDelta]:
        jobs, self._jobs = self._jobs, dict(list(self._jobs.items())[:SEATS])
        ran = list(self._jobs)
        try:
            time.sleep(self._seconds)
            return super().step()
        finally:
            waiting = {id: job for id, job in jobs.items() if id in self._jobs or id not in ran}
            self._jobs = {} if self._control.fail_step else waiting
            if self.index.events is not None:
                self.index.events.flush()

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self._cached.clear()
        self.index.clear()
        if self.index.events is not None:
            self.index.events.flush()
        return super().reset_prefix_cache(reset_running_requests)

    def stats(self):  # type: ignore[no-untyped-def]
        return replace(
            super().stats(), prefix_queries=self.index.queries, prefix_hits=self.index.hits
        )


class Several(Running):
    """A server over several such engines, which share one Control.

    Attributes:
        made: the engines, in the order of their starts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engines: int,
        pages: int = 1 << 20,
        seconds: float = 0.0,
        settings: Settings = SETTINGS,
    ):
        super().__init__(tokenizer, settings, engines=engines)
        self.made: list[CachingEngine] = []
        self._size = pages, seconds

    def factory(self):  # type: ignore[no-untyped-def]
        def make(config: EngineConfig, on_phase: object) -> CachingEngine:
            self.made.append(CachingEngine(config, self.control, self._tokenizer, *self._size))
            return self.made[-1]

        return make
