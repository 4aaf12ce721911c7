"""An engine without a model, for tests of the HTTP edge: it answers every prompt with the prompt
itself, one token a step, or with scripted pieces of text.

`Control` is the test's hand on it: freeze steps, wait until something was seen, make a step fail.
No clock is involved.
"""

from __future__ import annotations

import os
import pathlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxllm.cache.events import KVEventBatch
from jaxllm.cache.pool import PagePool
from jaxllm.config import ConfigError, EngineConfig, Resolved
from jaxllm.engine.output.engine_view import pool_view
from jaxllm.logprobs import most_logprobs, packed_from
from jaxllm.messages import (
    EngineStats,
    EngineView,
    GenerateRequest,
    PromptLogprobs,
    RequestError,
    RequestTimes,
    StepTotals,
    TextDelta,
    TokenLogprobs,
)
from jaxllm.tokenizer import Tokenizer
from tests.server.stuck import never_return

RESOLVED = Resolved(
    model_dir="fake",
    model_type="fake",
    dtype="float32",
    kv_dtype="float32",
    max_model_len=256,
    page_size=16,
    group_pages=(64,),
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_num_queued_reqs=24,
    vocab_size=320,
    tensor_parallel_size=1,
    max_logprobs=20,
    logprobs_mode="raw_logprobs",
    enable_prefix_caching=True,
    async_scheduling=False,
    scheduling_policy="fcfs",
    preemption_mode="recompute",
    host_pages=0,
    host_cached_pages=0,
    moved_pages=0,
    staged_pages=0,
    attention_backend="fake",
    attention_reason="a test",
)


class Control:
    """Shared by a test and the engine's thread."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.changed = threading.Condition()
        self.added: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.left = False
        self.running: set[str] = set()
        self.most_choices = 0  # at once
        self.fail_step: str | None = None
        self.fail_add: Exception | None = None
        self.error_delta: bool | str = False  # a text: the field at fault
        self.broken = ""  # what the next self-check finds
        self.busy = False  # a reset of the prefix cache is refused
        self.resets: list[bool] = []
        self.weights: list[str] = []  # directories that they were updated from
        self.prefix_miss: str | None = None  # of every answer
        self.counted: dict[str, Any] = {}  # statistics, by the name of their field
        self.pieces: list[str] = []  # texts of every answer's tokens, in place of the prompt's

    def saw(self, condition: Callable[[], bool], timeout: float = 60) -> bool:
        """Wait until the engine's thread has made `condition` true."""
        with self.changed:
            return self.changed.wait_for(condition, timeout)


@dataclass
class _Job:
    request: GenerateRequest
    sent: list[int] = field(default_factory=list)  # per choice
    text: list[str] = field(default_factory=list)
    first: float = 0.0


class FakeEngine:
    """See `jaxllm.engine.engine.Engine`."""

    def __init__(self, config: EngineConfig, control: Control, tokenizer: Tokenizer | None):
        if config.max_model_len == -7:
            raise ConfigError("--max-model-len must be at least 1, got -7")
        self.resolved = replace(
            RESOLVED,
            model_dir=config.model,
            max_model_len=config.max_model_len or RESOLVED.max_model_len,
            scheduling_policy=config.scheduling_policy,
            max_num_queued_reqs=config.max_num_queued_reqs or 24,
            max_logprobs=most_logprobs(config.max_logprobs, RESOLVED.vocab_size),
            page_offer=config.kv_transfer_config,
        )
        self.sleeper = self
        self._control, self._tokenizer = control, tokenizer
        self._jobs: dict[str, _Job] = {}
        self._stats = EngineStats(num_pages=64, free_pages=64)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def awaits_grammar(self) -> bool:
        return False

    @property
    def wait_seconds(self) -> float:
        return 0.0

    def make_late(self, made: Callable[[], None]) -> None:
        pass

    def when_built(self, heard: Callable[[], None]) -> None:
        pass

    def add(self, request: GenerateRequest) -> None:
        if self._control.fail_add is not None:
            raise self._control.fail_add
        if self._stats.sleep_level:
            raise RequestError("the model sleeps", None, "sleeping")
        if len(request.prompt.tokens) >= self.resolved.max_model_len:
            raise RequestError("too long", "prompt", "context_length_exceeded")
        self._jobs[request.id] = _Job(request, [0] * request.params.n, [""] * request.params.n)
        self._control.most_choices = max(
            self._control.most_choices,
            sum(sent >= 0 for job in self._jobs.values() for sent in job.sent),
        )
        self._stats = replace(
            self._stats, prompt_tokens=self._stats.prompt_tokens + len(request.prompt.tokens)
        )
        with self._control.changed:
            self._control.added.append(request)
            self._control.running.add(request.id)
            self._control.changed.notify_all()

    def sleep(self, level: int) -> None:
        if self._jobs:
            raise ValueError("requests are running")
        self._stats = replace(self._stats, sleep_level=level)

    def wake_up(self) -> None:
        self._stats = replace(self._stats, sleep_level=0)

    def update_weights(self, directory: pathlib.Path) -> None:
        if not (directory / "config.json").exists():
            raise ConfigError(f"no model at {directory}")
        self._control.weights.append(str(directory))

    def abort(self, request_id: str) -> None:
        if self._jobs.pop(request_id, None) is not None:
            with self._control.changed:
                self._control.aborted.append(request_id)
                self._control.running.discard(request_id)
                self._control.changed.notify_all()

    def step(self) -> list[TextDelta]:
        self._control.go.wait()
        if self._control.fail_step is not None:
            self._jobs.clear()  # the engine starts over
            with self._control.changed:
                self._control.running.clear()
            raise RuntimeError(self._control.fail_step)
        deltas = [
            self._advance(job, index)
            for job in list(self._jobs.values())
            for index in range(job.request.params.n)
            if job.sent[index] >= 0
        ]
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + 1,
            generation_tokens=self._stats.generation_tokens + len(deltas),
            kv_usage=0.0,
        )
        for delta in deltas:
            job = self._jobs.get(delta.id)
            if job is not None and all(sent < 0 for sent in job.sent):
                del self._jobs[delta.id]
                with self._control.changed:
                    self._control.running.discard(delta.id)
                    self._control.changed.notify_all()
        return deltas

    def _advance(self, job: _Job, index: int) -> TextDelta:
        prompt, params = job.request.prompt.tokens, job.request.params
        at = job.sent[index]
        token = prompt[at % len(prompt)]
        pieces = self._control.pieces
        text = self._tokenizer.token_text(token) if self._tokenizer is not None else ""
        if pieces:
            text = pieces[at]
        job.first = job.first or time.time()
        job.sent[index] += 1
        job.text[index] += text
        reason: str | None = None
        stop: str | int | None = None
        if self._control.error_delta:
            reason = "error"
        elif token in (params.stop_token_ids or ()):
            reason, stop, text = "stop", token, ""
        elif found := next((s for s in params.stop_strings if s in job.text[index]), None):
            reason, stop, text = "stop", found, ""
        elif at + 1 == params.max_tokens:
            reason = "length"
        elif pieces:
            reason = "stop" if at + 1 == len(pieces) else None
        elif not params.ignore_eos and at + 1 == len(prompt) and at + 1 > params.min_tokens:
            reason = "stop"
        if reason is not None:
            job.sent[index] = -1
        now = time.time()
        return TextDelta(
            id=job.request.id,
            index=index,
            token_ids=[token],
            text=text,
            logprobs=self._logprobs(token, params.logprobs),
            prompt_logprobs=prompt_scores(prompt, params.prompt_logprobs) if at == 0 else None,
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=16 if len(prompt) > 16 else 0,
            prefix_miss=self._control.prefix_miss if reason is not None and index == 0 else None,
            times=None
            if reason is None
            else RequestTimes(
                arrival=job.request.arrival, scheduled=now, first_token=job.first, last_token=now
            ),
            error_param=self._control.error_delta
            if isinstance(self._control.error_delta, str)
            else None,
        )

    def _logprobs(self, token: int, top: int | None) -> bytes | None:
        if top is None:
            return None
        entries = [(token, -0.25), *((other, float("-inf")) for other in range(top - 1))][:top]
        return packed_from([TokenLogprobs(token_id=token, logprob=-0.25, rank=1, top=entries)], top)

    def self_check(self) -> None:
        problem = self._control.broken
        self._stats = replace(
            self._stats,
            self_checks=self._stats.self_checks + 1,
            self_check_failures=self._stats.self_check_failures + bool(problem),
            self_check_problem=problem,
        )

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        if self._control.busy:
            return False
        self._control.resets.append(reset_running_requests)
        return True

    @property
    def watch(self) -> FakeEngine:
        """It watches itself."""
        return self

    @property
    def runner(self) -> FakeEngine:
        return self

    def leave(self) -> None:
        self._control.left = True

    @property
    def scheduler(self) -> FakeEngine:
        """It is all parts of an engine."""
        return self

    kv_manager = scheduler

    def listen(self, listener: Callable[[KVEventBatch], None]) -> None:
        raise ValueError("nothing is cached")

    def view(self) -> EngineView:
        return EngineView(
            pools=[pool_view(PagePool(self.resolved.num_pages, self.resolved.page_size))],
            step_totals={
                "decode": StepTotals(self._stats.steps, 1e-3, self._stats.generation_tokens)
            },
        )

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self._jobs), **self._control.counted)


def prompt_scores(prompt: list[int], top: int | None) -> PromptLogprobs | None:
    """Every token of a prompt is second, after its successor, the third is impossible, and so
    on."""
    if top is None:
        return None
    tokens = np.array(prompt[1:], np.int32)[:, None]
    ids = np.concatenate([tokens + 1, tokens, *(tokens + 2 + i for i in range(20))], axis=1)[
        :, :top
    ]
    values = np.broadcast_to(np.array([-0.25, -0.5, *[-np.inf] * 20], np.float32)[:top], ids.shape)
    chosen = np.full_like(tokens, np.float32(-0.5).view(np.int32))
    packed = np.concatenate(
        [chosen, np.full_like(tokens, 2), ids, values.view(np.int32) if top else ids], axis=1
    )
    return PromptLogprobs(top=top, packed=packed.astype(np.int32).tobytes())


def make(
    control: Control, tokenizer: Tokenizer | None, gate: pathlib.Path | None = None
) -> Callable[..., FakeEngine]:
    """A factory for `process.EngineProcess`. Loading lasts until the other end of `gate`, a named
    pipe, is closed."""

    def factory(config: EngineConfig, on_phase: Callable[..., None]) -> FakeEngine:
        if gate is not None:
            on_phase("Compiling", None, 12, 36)
            gate.read_bytes()
            on_phase("Compiling", 1.0)
        if os.environ.get("STUCK_TOKENIZER") == "held" and config.max_model_len is None:
            never_return(holding_the_lock=True)
        on_phase("Loading nothing", 0.0)
        return FakeEngine(config, control, tokenizer)

    return factory


# The engine process of the lifecycle tests: adds its pid to a file, and runs on after SIGUSR1 when
# started frozen
if __name__ == "__main__":
    import signal
    import sys

    from jaxllm.server.engine.process import main

    held = Control()
    if os.environ.get("FAKE_ENGINE_FROZEN"):
        held.go.clear()
    signal.signal(signal.SIGUSR1, lambda *_: held.go.set())
    with open(os.environ["FAKE_ENGINE_PID"], "a") as numbers:
        numbers.write(f"{os.getpid()}\n")
    pipe = os.environ.get("FAKE_ENGINE_GATE")
    sys.exit(main(factory=make(held, None, pathlib.Path(pipe) if pipe else None)))
