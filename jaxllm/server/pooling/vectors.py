"""The routes that give a vector or classes for each input."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.pooling import TASKS
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.pooling.endpoint import PoolingEndpoint, listing
from jaxllm.server.pooling.requests import (
    EMBED_DTYPES,
    INPUT_FIELDS,
    Form,
    InputRequest,
    read_inputs,
)
from jaxllm.tokenizer import Pair, Tokenizer


class InputEndpoint(PoolingEndpoint):
    """A route whose prompts are inputs, or one conversation."""

    fields = INPUT_FIELDS

    async def tokenise(self, request: InputRequest) -> list[Pair]:
        """Texts are encoded, token ids stay."""
        params, limit = request.options.params, self._state.resolved.max_model_len
        if request.conversation is not None:
            ids = await self._state.render(request.conversation, params.length(limit) is not None)
            return [Pair(params.truncated(ids, limit))]
        texts = [each for each in request.inputs if isinstance(each, str)]
        if not texts:
            return [Pair(ids) for ids in request.inputs if isinstance(ids, list)]

        def encode(tokenizer: Tokenizer) -> list[Pair]:
            cut = params.length(limit), params.truncation_side
            ids = tokenizer.encode_all(texts, *cut, special=request.special)
            return [*map(Pair, ids)]

        return await self.encoded(encode)


class Embeddings(InputEndpoint):
    """POST /v1/embeddings"""

    prefix = "embd"

    def parse(self, body: dict[str, Any]) -> InputRequest:
        """See `requests.read_inputs`."""
        return read_inputs(body, self._state.rules, "embed")

    def full_reply(self, request: InputRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """OpenAI's form."""
        data = [
            {"index": index, "object": "embedding", "embedding": encode(vector, request.form)}
            for index, vector in enumerate(vectors)
        ]
        return listing(data)


class Pooling(InputEndpoint):
    """POST /pooling"""

    prefix = "pool"

    def parse(self, body: dict[str, Any]) -> InputRequest:
        """See `requests.read_inputs`; `task` must be the model's."""
        task = body.get("task")
        if task not in (None, *TASKS):
            names = ", ".join(TASKS)
            raise bad_request(f"task must be one of {names}, got {describe(task)}", "task")
        return read_inputs(body, self._state.rules, *(TASKS if task is None else (task,)))

    def full_reply(self, request: InputRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """vLLM's form."""
        data = [
            {"index": index, "object": "pooling", "data": encode(vector, request.form)}
            for index, vector in enumerate(vectors)
        ]
        return listing(data)


class Classify(InputEndpoint):
    """POST /classify"""

    prefix = "classify"

    def parse(self, body: dict[str, Any]) -> InputRequest:
        """See `requests.read_inputs`."""
        return read_inputs(body, self._state.rules, "classify")

    def full_reply(self, request: InputRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """vLLM's form: the likeliest label, and a number for each."""
        labels = request.options.pooling.labels
        data = [
            {
                "index": index,
                "label": labels[int(vector.argmax())],
                "probs": vector,
                "num_classes": len(labels),
            }
            for index, vector in enumerate(vectors)
        ]
        return listing(data)


def encode(vector: np.ndarray, form: Form) -> Any:
    """The vector for JSON: float32 numbers, or the bytes of its type in base64."""
    rounded = np.ascontiguousarray(vector.astype(EMBED_DTYPES[form.dtype]))
    if form.encoding == "float":
        return rounded.astype(np.float32)
    size = rounded.itemsize
    words = rounded.view(f"u{size}").astype(f"{form.order}u{size}")
    return base64.b64encode(words.tobytes()).decode()
