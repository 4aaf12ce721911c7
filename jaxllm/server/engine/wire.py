"""The typed messages between the HTTP process and the engine process, and their framing: 4 bytes of
length, then msgpack.

Ownership: the HTTP process sends `Start` once, then `Add`, `Pool`, `Abort`, each
`Command`, `Inspect` and `Stop`; the engine process answers `Phase`…, `Ready`, then one
`Outputs` per step, `Rejected` per refused request, `Answered` per `Command`,
`Inspected` per `Inspect`, `StepFailed` after a step that failed, and `Died` at its end.
"""

from __future__ import annotations

import struct
from typing import TypeAliasType

import msgspec

from jaxllm.cache.events import KVEvent
from jaxllm.commands import Profile, ResetPrefixCache, Sleep, UpdateWeights, WakeUp
from jaxllm.config import EngineConfig, Resolved
from jaxllm.messages import EngineStats, EngineView, GenerateRequest, PoolingRequest, TextDelta

MAX_FRAME = 1 << 30
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load this and get ready; with `tells_prefixes`, say with each step what the prefix cache
    holds."""

    config: EngineConfig
    tells_prefixes: bool = False


class Add(msgspec.Struct, tag=True, frozen=True):
    """Start a request."""

    request: GenerateRequest


class Pool(msgspec.Struct, tag=True, frozen=True):
    """Start a request of a pooling model."""

    request: PoolingRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Abort a request; unknown ids are ignored."""

    id: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the process at once."""


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Say what the engine is doing."""


class Phase(msgspec.Struct, tag=True, frozen=True):
    """A phase of the start.

    Attributes:
        seconds: that it took, once it has ended; None of one that has begun or goes on.
        done: programs or bytes so far.
        total: of which `done` is a part; 0 where that is not known.
    """

    name: str
    seconds: float | None
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine takes requests. `stats` are as they are before the first. `hash_start` is where
    the hashes begin that it tells, if it tells any (`PageHasher`)."""

    resolved: Resolved
    stats: EngineStats
    hash_start: bytes | None = None


class Outputs(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The result of one step; `deltas` may be empty (part of a prompt, an abort). `prefixes` is
    what entered and left the prefix cache, without tokens."""

    deltas: list[TextDelta]
    stats: EngineStats
    prefixes: list[KVEvent] = []


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The engine refused a request."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Answered(msgspec.Struct, tag=True, frozen=True):
    """The answer to the oldest unanswered `Command`; None is success."""

    error: str | None


class Inspected(msgspec.Struct, tag=True, frozen=True):
    """The answer to the oldest unanswered `Inspect`."""

    view: EngineView


class Died(msgspec.Struct, tag=True, frozen=True):
    """The engine process ends; `expected` when the configuration is at fault."""

    reason: str
    expected: bool = False


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """A step failed: the engine started over and has lost every request."""


type Command = Profile | ResetPrefixCache | Sleep | WakeUp | UpdateWeights
type ToEngine = Start | Add | Pool | Abort | Command | Inspect | Stop
type ToServer = Phase | Ready | Outputs | Rejected | Answered | Inspected | StepFailed | Died


class Frames[M]:
    """Decodes messages of one union from a byte stream that arrives in arbitrary pieces."""

    def __init__(self, union: TypeAliasType):
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union.__value__)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that `data` completes. Raises ValueError on a frame too long or
        malformed."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        position = 0
        with memoryview(buffer) as view:
            while len(buffer) - position >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, position)
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
                if len(buffer) - position - _LENGTH.size < size:
                    break
                position += _LENGTH.size
                messages.append(self._decoder.decode(view[position : position + size]))
                position += size
        del buffer[:position]
        return messages


_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | ToServer) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body
