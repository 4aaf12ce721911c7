"""What a step runs on the device, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from jaxllm.engine.runtime.program import Key


@dataclass(frozen=True)
class Launch:
    """Programs in order, each with the int32 buffer that the host hands over, if it takes one.

    It holds nothing else, so a process with an equal engine can replay it. Buffers may be views of
    memory that later steps reuse: write a launch to bytes before the next one is packed.
    """

    calls: tuple[tuple[Key, np.ndarray | None], ...]

    def to_bytes(self) -> bytes:
        """The launch for another process."""
        return msgspec.msgpack.encode(
            [(*key, None if buffer is None else buffer.tobytes()) for key, buffer in self.calls]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Launch:
        """The launch that `to_bytes` wrote."""
        found = msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...], bytes | None]])
        return cls(
            tuple(
                (Key(name, sizes), None if raw is None else np.frombuffer(raw, np.int32))
                for name, sizes, raw in found
            )
        )
