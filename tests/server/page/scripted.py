"""A server whose model says what a test wrote down, piece by piece."""

from __future__ import annotations

import threading
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.messages import TextDelta
from jaxllm.server.engine.loading import Factory
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control, FakeEngine
from tests.server.harness import Running

WAIT = ""  # a piece before which the model waits for `Script.go_on`


class Script:
    """What the model answers to every prompt."""

    def __init__(self) -> None:
        self.pieces = ["fine"]
        self.go_on = threading.Event()
        self.go_on.set()


class ScriptedEngine(FakeEngine):
    """One piece a step."""

    def __init__(
        self, config: EngineConfig, control: Control, tokenizer: Tokenizer | None, script: Script
    ):
        super().__init__(config, control, tokenizer)
        self._script = script
        self._answers: dict[str, list[str]] = {}  # by request: the script may change meanwhile

    def _advance(self, job: Any, index: int) -> TextDelta:
        at = job.sent[index]
        pieces = self._answers.setdefault(job.request.id, self._script.pieces)
        if pieces[at] is WAIT:
            self._script.go_on.wait()
        last = at + 1 == len(pieces)
        job.sent[index] = -1 if last else at + 1
        return TextDelta(
            id=job.request.id,
            index=index,
            token_ids=[1],
            text=pieces[at],
            finish_reason="stop" if last else None,
        )


class ScriptedServer(Running):
    """`script` holds the answers; the harness's `control` works as ever."""

    script: Script

    def factory(self) -> Factory:
        """The scripted engine."""
        self.script = Script()
        return lambda config, on_phase: ScriptedEngine(
            config, self.control, self._tokenizer, self.script
        )

    def __exit__(self, *error: object) -> None:
        self.script.go_on.set()
        super().__exit__(*error)
