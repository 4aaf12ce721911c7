"""An engine under random traffic: requests come, are aborted, are swapped out and back, and leave.
Each must get the tokens that its prompt gets alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.correct_engine import (
    GREEDY,
    NEAR_TIE,
    SMALL,
    WAYS,
    Heedless,
    Row,
    ask,
    gap,
    shared,
    small_model,
)
from benchmarks.deadline import ends_within
from jaxllm import LLM, SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt

PROMPTS = 24
# Of a prompt and of an answer: short ones are admitted, and then grow out of the pool
LONGEST, MOST_TOKENS = 120, 300
CROWD = 8  # requests at once, at most
# A request has up to seven pages of 64 tokens, so a crowd does not fit
TIGHT: dict[str, Any] = {
    "num_gpu_blocks_override": 12,
    "preemption_mode": "swap",
    "swap_space": 0.01,
    "enable_prefix_caching": False,
}
BUSY: dict[str, Any] = {
    "max_model_len": LONGEST + MOST_TOKENS,
    "max_num_seqs": CROWD,
    "async_scheduling": True,
    "enable_prefix_caching": True,
}
START_SECONDS, STEP_SECONDS = 300.0, 0.1  # which a soak may take


def greedy(tokens: int) -> SamplingParams:
    """The likeliest tokens, so many."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Traffic:
    """Random requests for an engine; `alone` has the tokens of each prompt by itself. With `gaps`,
    how much likelier each of these was than the second likeliest, a request may leave them where
    the two were nearly tied; what follows there is not compared.

    Attributes:
        wrong: requests that got other tokens, or too few.
        parted: requests that left theirs at a near tie.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        alone: list[list[int]],
        gaps: Sequence[Sequence[float]] | None = None,
    ):
        self.engine, self.prompts, self.alone, self.gaps = engine, prompts, alone, gaps
        self.draw = random.Random(1)
        self.got: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[int, int]] = {}  # the prompt's number, and tokens
        self.left: set[str] = set()
        self.wrong: list[str] = []
        self.ended = self.aborted = self.parted = 0

    def run(self, steps: int) -> None:
        """At least so many steps, and then until nothing is left."""
        until = self.engine.stats().steps + steps
        while self.engine.stats().steps < until:
            self.act()
        while self.engine.has_work:
            self.step()
        self.wrong += self.got  # nobody runs them, and they have not ended

    def act(self) -> None:
        """Perhaps add a request, perhaps abort one, and step."""
        draw = self.draw
        if len(self.got) < CROWD and draw.random() < 0.2:
            number = draw.randrange(len(self.prompts))
            tokens = draw.randrange(1, len(self.alone[number]))
            id = f"{number}-{draw.getrandbits(60)}"
            self.got[id], self.wanted[id] = [], (number, tokens)
            given = GenerateRequest(
                id=id, prompt=Prompt(self.prompts[number]), params=greedy(tokens)
            )
            self.engine.add(given)
        if self.got and draw.random() < 0.01:
            self.engine.abort(draw.choice(sorted(self.got)))
        self.step()

    def step(self) -> None:
        """Compare what a step gives."""
        for delta in self.engine.step():
            got, (number, tokens) = self.got[delta.id], self.wanted[delta.id]
            got += delta.token_ids
            if delta.id not in self.left:
                self._compare(delta.id, got, number)
            if delta.finish_reason is not None:
                aborted = delta.finish_reason == "abort"
                if not aborted and len(got) != tokens and delta.id not in self.wrong:
                    self.wrong.append(delta.id)
                self.aborted += aborted
                self.ended += 1
                self.left.discard(delta.id)
                del self.got[delta.id], self.wanted[delta.id]

    def _compare(self, id: str, got: list[int], number: int) -> None:
        alone = self.alone[number]
        if got == alone[: len(got)]:
            return
        at = shared(got, alone)
        self.left.add(id)
        if self.gaps is not None and self.gaps[number][at] < NEAR_TIE:
            self.parted += 1
        else:
            self.wrong.append(id)


def soak(steps: int, head_dim: int = 128, **more: Any) -> Iterator[Row]:
    """Two soaks in bfloat16: batch-invariant, which preempts nobody and must give every token; and
    on few pages with swaps, where rounding may turn a token whose rival is nearly as likely."""
    ways: dict[str, dict[str, Any]] = {"batch-invariant": {"batch_invariant": True}, "swaps": TIGHT}
    for name, options in ways.items():
        with ends_within(START_SECONDS + STEP_SECONDS * steps, f"the soak ({name})"):
            with small_model(head_dim) as directory:
                llm = LLM(directory, **WAYS | BUSY | options | more)
            row = soaked(llm, steps, exact=name == "batch-invariant")
        yield {"check": f"soak, {name}"} | row


def soaked(llm: LLM, steps: int, exact: bool) -> Row:
    """The row of one engine. Where it is not `exact`, swaps must take place."""
    draw, engine = random.Random(0), llm.engine
    assert isinstance(engine, Engine)
    prompts = [
        [draw.randrange(SMALL["vocab_size"]) for _ in range(draw.randrange(1, LONGEST))]
        for _ in range(PROMPTS)
    ]
    params = [SamplingParams(**GREEDY | {"max_tokens": MOST_TOKENS})] * PROMPTS
    answers = ask(llm, prompts, params, together=False)
    gaps = [[gap(position) for position in answer.logprobs or []] for answer in answers]
    alone = [list(answer.token_ids) for answer in answers]
    engine.scheduler.estimator = Heedless()
    traffic = Traffic(engine, prompts, alone, None if exact else gaps)
    before, begin = engine.stats(), time.perf_counter()
    traffic.run(steps)
    engine.self_check()
    after = engine.stats()
    row: Row = {
        "steps": after.steps - before.steps,
        "ended": traffic.ended,
        "aborted": traffic.aborted,
        "preemptions": after.preemptions - before.preemptions,
        "pages_swapped_in": after.pages_loaded - before.pages_loaded,
        "parted_at_near_ties": traffic.parted,
        "wrong": len(traffic.wrong),
        "self_check": after.self_check_problem,
        "compiles": after.compiles_after_warmup,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    swapped = exact or min(row["preemptions"], row["pages_swapped_in"]) > 0
    fine = not traffic.wrong and not after.self_check_problem and traffic.aborted > 0
    return row | {"ok": fine and swapped and traffic.ended > traffic.aborted}
