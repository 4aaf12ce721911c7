"""A server whose model says what a test makes of each prompt, with room for prompts of agents."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.server.engine.loading import Factory
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control, FakeEngine
from tests.server.harness import Running, with_settings

DEMO = pathlib.Path(__file__).parents[2] / "jaxllm" / "demo"
ROOM = 1 << 18  # tokens
PIECE = 7  # characters a step, so that markers are cut

type Answer = Callable[[str], str]


class AgentEngine(FakeEngine):
    """Answers each prompt with `answer` of its text, some characters a step."""

    def __init__(
        self, config: EngineConfig, control: Control, tokenizer: Tokenizer, answer: Answer
    ):
        super().__init__(config, control, tokenizer)
        self._answer = answer
        self._texts: dict[str, str] = {}

    def add(self, request: GenerateRequest) -> None:
        assert self._tokenizer is not None
        prompt = self._tokenizer.decode(request.prompt.tokens, skip_special_tokens=False)
        self._texts[request.id] = self._answer(prompt)
        super().add(request)

    def _advance(self, job: Any, index: int) -> TextDelta:
        text, at = self._texts[job.request.id], job.sent[index] * PIECE
        last = at + PIECE >= len(text)
        job.sent[index] = -1 if last else job.sent[index] + 1
        return TextDelta(
            id=job.request.id,
            index=index,
            token_ids=[1],
            text=text[at : at + PIECE],
            finish_reason="stop" if last else None,
        )


class AgentServer(Running):
    """The fake model as `demo`, with the tokenizer and the template of the built-in one.

    `prompts` are those that came, with their control tokens.
    """

    def __init__(self, answer: Answer, room: int = ROOM):
        settings = with_settings(served=("demo",), template_kwargs={"enable_thinking": True})
        config = EngineConfig(model="fake", max_model_len=room)
        super().__init__(Tokenizer.load(DEMO), settings, config=config)
        self.answer = answer
        self.prompts: list[str] = []

    def factory(self) -> Factory:
        """The engine that answers."""

        def said(prompt: str) -> str:
            self.prompts.append(prompt)
            return self.answer(prompt)

        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        return lambda config, on_phase: AgentEngine(config, self.control, tokenizer, said)
