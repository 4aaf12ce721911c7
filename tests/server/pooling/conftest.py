"""Servers around engines that pool by counting: the vector of a prompt is [sum of its ids, its
length, 3], and that of a token, where every token has one, [its id, the prompt's length, 3]. Longer
vectors go on with `MORE`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from jaxllm.config import EngineConfig
from jaxllm.messages import PoolingRequest, TextDelta
from jaxllm.pooling import ALL, Pooling
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control, FakeEngine
from tests.server.harness import Running

MORE = (-1, 0, -1, 1, -1)
EMBEDS = Pooling(
    task="embed", modes=("last",), maps=(), size=3, normalises=True, is_matryoshka=True
)
LABELS = Pooling(
    task="classify",
    modes=("last",),
    maps=(),
    size=3,
    labels=("sum", "length", "three"),
    activation="softmax",
)
TOKENS = replace(EMBEDS, task="token_embed", modes=(ALL,), normalises=False)
SCORES = replace(LABELS, size=1, labels=("LABEL_0",), activation="identity")


class CountingEngine(FakeEngine):
    """See `jaxllm.engine.pooling_engine.PoolingEngine`."""

    def __init__(
        self, config: EngineConfig, control: Control, tokenizer: Tokenizer | None, pooling: Pooling
    ):
        super().__init__(config, control, tokenizer)
        self.resolved = replace(self.resolved, pooling=pooling)
        self._prompts: dict[str, list[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._prompts)

    def add(self, request: Any) -> None:
        assert isinstance(request, PoolingRequest)
        self._control.added.append(request)
        self._prompts[request.id] = request.prompt.tokens

    def abort(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def step(self) -> list[TextDelta]:
        prompts, self._prompts = self._prompts, {}
        assert self.resolved.pooling is not None
        size, of_tokens = self.resolved.pooling.size, self.resolved.pooling.of_tokens
        return [
            TextDelta(
                id=id,
                index=0,
                token_ids=[],
                text="",
                finish_reason="stop",
                pooled=np.array(rows, np.float32)[:, :size].tobytes(),
            )
            for id, ids in prompts.items()
            for rows in [
                [[total, len(ids), 3, *MORE] for total in (ids if of_tokens else [sum(ids)])]
            ]
        ]


class PoolingServer(Running):
    """A server around a `CountingEngine`."""

    def __init__(self, tokenizer: Tokenizer | None, pooling: Pooling):
        super().__init__(tokenizer)
        self._pooling = pooling

    def factory(self) -> Callable[..., Any]:
        return lambda config, on_phase: CountingEngine(
            config, self.control, self._tokenizer, self._pooling
        )


@pytest.fixture(scope="module")
def embedder(tokenizer: Tokenizer) -> Iterator[PoolingServer]:
    """An embedding model."""
    with PoolingServer(tokenizer, EMBEDS) as running:
        yield running


@pytest.fixture(scope="module")
def token_embedder(tokenizer: Tokenizer) -> Iterator[PoolingServer]:
    """A model that gives a vector for every token."""
    with PoolingServer(tokenizer, TOKENS) as running:
        yield running


@pytest.fixture(scope="module")
def classifier(tokenizer: Tokenizer) -> Iterator[PoolingServer]:
    """A model with three labels."""
    with PoolingServer(tokenizer, LABELS) as running:
        yield running


@pytest.fixture(scope="module")
def reranker(tokenizer: Tokenizer) -> Iterator[PoolingServer]:
    """A model with one label."""
    with PoolingServer(tokenizer, SCORES) as running:
        yield running


@pytest.fixture(scope="module")
def embeddings_client(embedder: PoolingServer) -> Iterator[openai.OpenAI]:
    """openai-python against the embedding model."""
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        yield client
