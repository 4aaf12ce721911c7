"""The engines of one model, each with devices of its own, as if they were one: data parallelism.

With one engine nothing is looked up and nothing is told of prefixes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence

from jaxllm.cache.prefix import PageHasher
from jaxllm.config import ConfigError, Resolved
from jaxllm.messages import EngineStats, EngineView, GenerateRequest, PoolingRequest, StepTotals
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.routing import Candidate, cached_tokens, choose
from jaxllm.server.engine.streams import Stream
from jaxllm.server.engine.wire import Command
from jaxllm.server.errors import ApiError, overloaded

# What engines of one model decide alike on equal devices
ALIKE = (
    "dtype",
    "kv_dtype",
    "page_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "attention_backend",
)
SHARES = ("kv_usage", "host_usage")  # of statistics; the fullest engine's is that of all


class EngineGroup:
    """Sends each request to one of `clients`. Everything here runs on the event loop's thread;
    nothing blocks.

    Attributes:
        max_queued_tokens: of prompts that wait, beyond which requests are refused; None: no limit.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        max_queued_tokens: int | None = None,
        seed: int = 0,
    ):
        """`seed` decides the draws of requests without a seed of their own, where there are several
        engines: each would draw the same."""
        self.clients = tuple(clients)
        self.max_queued_tokens = max_queued_tokens
        self._seeds = random.Random(seed)

    def check_alike(self) -> None:
        """Raise ConfigError unless all engines have decided alike what tokens depend on."""
        first, *others = (client.resolved for client in self.clients)
        for number, decision in enumerate(others, 1):
            for name in ALIKE:
                if getattr(first, name) != getattr(decision, name):
                    raise ConfigError(
                        f"--data-parallel-size: {name} is {getattr(first, name)} in engine 0 and "
                        f"{getattr(decision, name)} in engine {number}; give all engines equal "
                        "devices (--visible-devices)"
                    )

    @property
    def resolved(self) -> Resolved:
        """What the first engine decided, with the shortest context of all."""
        decisions = [client.resolved for client in self.clients]
        return dataclasses.replace(
            decisions[0], max_model_len=min(r.max_model_len for r in decisions)
        )

    @property
    def alive(self) -> bool:
        """Whether any engine takes requests."""
        return any(client.alive for client in self.clients)

    @property
    def restarting(self) -> bool:
        """Whether any engine process is being started again."""
        return any(client.restarting for client in self.clients)

    @property
    def in_flight(self) -> int:
        """Engine requests that have not ended."""
        return sum(client.in_flight for client in self.clients)

    @property
    def choices(self) -> int:
        """Choices in flight."""
        return sum(client.choices for client in self.clients)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts without a first output."""
        return sum(client.waiting_tokens for client in self.clients)

    @property
    def capacity(self) -> int:
        """Choices that the engines which take requests run and queue at most."""
        return sum(client.capacity for client in self.clients if client.alive)

    @property
    def stats(self) -> EngineStats:
        """The engines' latest snapshots as one."""
        return total([client.stats for client in self.clients])

    def seconds_without_step(self) -> float:
        """Of the engine that has been silent for longest although it has requests."""
        return max(client.seconds_without_step() for client in self.clients)

    def submit(self, requests: Sequence[GenerateRequest | PoolingRequest]) -> Stream:
        """Take all prompts of one HTTP request, or none. Raises ApiError when the queue is full or
        no engine runs."""
        alive = self.check_capacity(
            sum(request.params.samples for request in requests),
            sum(len(request.prompt.tokens) for request in requests),
        )
        stream = Stream(self._abort)
        for number, request in enumerate(requests):
            engine_for(request, alive).take(request, stream, number)
        for client in self.clients:
            client.send_waiting()
        return stream

    def check_capacity(self, choices: int, tokens: int = 0) -> list[EngineClient]:
        """The engines that take requests. Raises ApiError unless so many more choices and tokens of
        prompts fit: nothing is in flight, or all together stay within their capacity and
        `max_queued_tokens`."""
        alive = self._alive()
        present = self.choices
        capacity = sum(client.capacity for client in alive)
        if present and present + choices > capacity:
            raise overloaded(
                f"the queue is full ({present} of {capacity} choices in flight, "
                f"{choices} more asked for); try again later",
                "queue_full",
            )
        limit = self.max_queued_tokens
        waiting = self.waiting_tokens
        if limit is not None and waiting and waiting + tokens > limit:
            raise overloaded(
                f"the queue is full ({waiting} of {limit} tokens of prompts wait, {tokens} more "
                "came); try again later",
                "queue_full",
            )
        return alive

    def draw_seed(self) -> int | None:
        """A seed for a prompt whose request has none; None where the one engine draws its own."""
        if len(self.clients) == 1:
            return None
        return self._seeds.getrandbits(63)

    def fail_all(self, make: Callable[[], ApiError]) -> None:
        """End every request with an error of its own."""
        for client in self.clients:
            client.fail_all(make)

    async def run_command(self, command: Command) -> None:
        """Have every engine that has not been given up carry out a command. Raises ApiError when
        one cannot, and the others have done so then; or when one does not run just now, and none
        has: it would come back without having heard of it."""
        engines = [client for client in self.clients if not client.given_up] or self._alive()
        for client in engines:
            client.check_alive()
        done = await asyncio.gather(
            *(client.run_command(command) for client in engines), return_exceptions=True
        )
        for error in done:
            if error is not None:
                raise error

    async def inspect(self) -> EngineView:
        """What the engines do now, in detail. Raises ApiError when no engine runs."""
        return joined(await asyncio.gather(*(client.inspect() for client in self._alive())))

    def _alive(self) -> list[EngineClient]:
        """The engines that take requests. Raises ApiError when there is none."""
        clients = [client for client in self.clients if client.alive]
        if not clients:  # the one that is being started has the better news
            max(self.clients, key=lambda client: client.restarting).check_alive()
        return clients

    def _abort(self, stream: Stream) -> None:
        for client in self.clients:
            client.abort(stream)


def engine_for(
    request: GenerateRequest | PoolingRequest, engines: Sequence[EngineClient]
) -> EngineClient:
    """The engine that gets a request (`routing.choose`)."""
    first = engines[0]
    if len(engines) == 1:
        return first
    start = next((engine.hash_start for engine in engines if engine.hash_start is not None), None)
    cached = [0] * len(engines)
    if start is not None:
        hasher = PageHasher(first.resolved.page_size, start)
        cached = cached_tokens(request, hasher, [engine.cached for engine in engines])
    size = len(request.prompt.tokens)
    candidates = [
        Candidate(tokens, engine.load, engine.has_room(size), len(engine.cached))
        for tokens, engine in zip(cached, engines, strict=True)
    ]
    return engines[choose(candidates, first.resolved.max_num_batched_tokens)]


def total(engines: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines as one: sums, and the fullest one's shares. They sleep when
    all do."""
    if len(engines) == 1:
        return engines[0]
    columns = {
        field.name: [getattr(stats, field.name) for stats in engines]
        for field in dataclasses.fields(EngineStats)
    }
    sums = {name: sum(values) for name, values in columns.items() if isinstance(values[0], int)}
    steps = zip(*columns["step_tokens"], strict=True)
    return EngineStats(
        **sums
        | {name: max(columns[name]) for name in SHARES}
        | {
            "step_tokens": tuple(map(sum, steps)),
            "sleep_level": min(columns["sleep_level"]),
            "self_check_problem": next(filter(None, columns["self_check_problem"]), ""),
        }
    )


def joined(views: Sequence[EngineView]) -> EngineView:
    """The pools of all engines, and the sums of their steps."""
    totals: dict[str, StepTotals] = {}
    for step_type, total in (pair for view in views for pair in view.step_totals.items()):
        seen = totals.setdefault(step_type, StepTotals())
        totals[step_type] = StepTotals(
            seen.steps + total.steps, seen.seconds + total.seconds, seen.tokens + total.tokens
        )
    return EngineView(pools=[pool for view in views for pool in view.pools], step_totals=totals)
