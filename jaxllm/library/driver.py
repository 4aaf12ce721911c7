"""Runs an engine for `LLM`: one caller at a time, until all requests of a call have ended."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.engine.engine import Engine
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import RequestError, TextDelta


class Driver:
    """Steps an engine. Calls of several threads take turns."""

    def __init__(self, engine: Engine | PoolingEngine):
        self._engine = engine
        self._turn = threading.Lock()
        self._caller = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """No other thread runs requests meanwhile. Raises RequestError for a call from inside
        another, as by a host logits processor."""
        if self._caller == threading.get_ident():
            raise RequestError(
                "this LLM is in the middle of a call of this thread, which cannot wait for "
                "another; use a second LLM"
            )
        with self._turn:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = 0

    def run(
        self,
        requests: Sequence[Any],
        add_delta: Callable[[TextDelta], bool],
        use_tqdm: bool,
    ) -> None:
        """Run requests that this engine has validated. `add_delta` is given everything that becomes
        of them, and says whether a request has ended."""
        engine = self._engine
        bar = None
        if use_tqdm:
            bar = progress_bar(len(requests))
        try:
            with frozen_heap():
                for delta in self._deltas(requests):
                    if add_delta(delta) and bar is not None:
                        bar.update()
        except BaseException:
            for request in requests:
                engine.abort(request.id)
            while engine.has_work:  # so that the next call starts clean
                engine.step()
            raise
        finally:
            if bar is not None:
                bar.close()

    def _deltas(self, requests: Sequence[Any]) -> Iterator[TextDelta]:
        """Add requests as the engine's queue has room, and step it until all have ended."""
        engine = self._engine
        in_order = (
            engine.resolved.scheduling_policy == "fcfs" and type(engine.scheduler) is Scheduler
        )
        queue = iter(requests)
        waiting = next(queue, None)
        while waiting is not None or engine.has_work:
            # The device starts with one step's worth of tokens; the others are added while it
            # computes
            left = math.inf
            if in_order and not engine.has_work:
                left = engine.resolved.max_num_batched_tokens
            while waiting is not None and left > 0 and engine.queue_has_space(waiting):
                entered = waiting
                waiting = next(queue, None)
                engine.enter(entered)
                if waiting is not None and left < math.inf:
                    left -= engine.uncached_tokens(entered)
            yield from engine.step()


def progress_bar(prompts: int) -> tqdm[None]:
    """A bar of so many prompts. Even one that shows nothing takes its time to make."""
    return tqdm(total=prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude all present objects from garbage collections meanwhile: JAX keeps about a million,
    and visiting them takes longer than steps. Afterwards nothing is frozen."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
