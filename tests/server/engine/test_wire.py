"""The messages between the HTTP process and the engine process."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest

from jaxllm.commands import Profile, ResetPrefixCache
from jaxllm.config import EngineConfig
from jaxllm.messages import (
    EngineStats,
    EngineView,
    GenerateRequest,
    PoolView,
    RequestTimes,
    StepTotals,
    TextDelta,
)
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Died,
    Frames,
    Inspect,
    Inspected,
    Outputs,
    Phase,
    Ready,
    Rejected,
    Start,
    StepFailed,
    Stop,
    ToEngine,
    ToServer,
    encode,
)
from tests.server.fake import RESOLVED

PARAMS = SamplingParams(
    n=3,
    temperature=1,
    stop=["a", "b"],
    stop_token_ids=[1, 2],
    seed=-(2**63),
    max_tokens=None,
    presence_penalty=0,
    logprobs=2,
)
DELTA = TextDelta(
    id="x",
    index=1,
    token_ids=[5, 6],
    text="héllo\x00",
    logprobs=bytes(range(48)),
    finish_reason="stop",
    stop_reason=6,
    times=RequestTimes(arrival=1.5, scheduled=2, first_token=3, last_token=4),
)


VIEW = EngineView(
    pools=[
        PoolView(pages=3, page_size=16, window=None, held=1, cached=1, per_cell=2, cells="882000")
    ],
    step_totals={"decode": StepTotals(2, 0.5, 7)},
)


@pytest.mark.parametrize(
    ("message", "decoder"),
    [
        (Start(EngineConfig(max_model_len="auto", seed=7)), ToEngine),
        (
            Add(
                GenerateRequest(
                    id="x", prompt=Prompt([1, 2**31 - 1]), params=PARAMS, cache_salt="s"
                )
            ),
            ToEngine,
        ),
        (Abort("x"), ToEngine),
        (Profile(True), ToEngine),
        (ResetPrefixCache(True), ToEngine),
        (Inspect(), ToEngine),
        (Stop(), ToEngine),
        (Phase("Compiling", 1.5), ToServer),
        (Ready(RESOLVED, EngineStats()), ToServer),
        (
            Outputs(
                [DELTA, msgspec.structs.replace(DELTA, stop_reason="a", logprobs=None, times=None)],
                EngineStats(running=1, kv_usage=0.5),
            ),
            ToServer,
        ),
        (Rejected("x", "no", "prompt", "code"), ToServer),
        (Answered("why"), ToServer),
        (Inspected(VIEW), ToServer),
        (StepFailed(), ToServer),
        (Died("why", True), ToServer),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_message_arrives_as_it_was_sent_in_pieces_of_any_size(
    message: Any, decoder: Any
) -> None:
    data = encode(message) * 3
    for size in (1, 7, 4096):
        frames = Frames[Any](decoder)
        found = [
            got for at in range(0, len(data), size) for got in frames.feed(data[at : at + size])
        ]
        assert found == [message] * 3


def test_deltas_cost_the_garbage_collector_nothing_and_say_only_what_there_is() -> None:
    delta = TextDelta(id="x", index=0, token_ids=[5], text="")
    assert not gc.is_tracked(delta)
    assert (
        len(encode(Outputs([delta] * 2, EngineStats())))
        - len(encode(Outputs([delta], EngineStats())))
        < 40
    )


def test_a_frame_that_claims_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        Frames[ToEngine](ToEngine).feed(b"\xff\xff\xff\xff")
