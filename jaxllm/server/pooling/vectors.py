"""The routes that give a vector or classes for each input."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from jaxllm.pooling import TASKS
from jaxllm.server.endpoint import Reply
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.pooling.endpoint import Pooled, PoolingEndpoint, listing
from jaxllm.server.pooling.requests import (
    EMBED_DTYPES,
    ENDIANNESS,
    INPUT_FIELDS,
    OF_BYTES,
    Form,
    InputRequest,
    one_of,
    read_inputs,
)
from jaxllm.server.requests.known_fields import refuse_unsupported
from jaxllm.tokenizer import Pair, Tokenizer

BYTES = "application/octet-stream"

logger = logging.getLogger("jaxllm.server")


class InputEndpoint(PoolingEndpoint):
    """A route whose prompts are inputs, or one conversation."""

    fields = INPUT_FIELDS
    _warned = False

    def _warn_of_ids(self) -> None:
        """Log once that token ids came: those of another tokenizer give wrong vectors, and nothing
        in a request tells whose they are."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "inputs came as token ids, which are taken for ids of this model's tokenizer; "
                "LangChain's OpenAIEmbeddings sends OpenAI's unless it has "
                "check_embedding_ctx_length=False (logged once)"
            )

    async def tokenise(self, request: InputRequest) -> list[Pair]:
        """Texts are encoded, token ids stay."""
        params = request.options.params
        limit = self._state.resolved.max_model_len
        if request.conversation is not None:
            ids = await self._state.render(request.conversation, params.length(limit) is not None)
            return [Pair(params.truncated(ids, limit))]
        texts = [text for text in request.inputs if isinstance(text, str)]
        if not texts:
            self._warn_of_ids()
            return [Pair(ids) for ids in request.inputs if isinstance(ids, list)]

        def encode(tokenizer: Tokenizer) -> list[Pair]:
            cut = params.length(limit), params.truncation_side
            ids = tokenizer.encode_all(texts, *cut, special=request.special)
            return [*map(Pair, ids)]

        return await self.encoded(encode)


class VectorEndpoint(InputEndpoint):
    """A route that writes vectors as requests ask for, in bytes alone if they do."""

    def reply(self, request: InputRequest, id: str, pooled: Pooled) -> Reply:
        """vLLM's form: where each vector lies in the bytes is told in the header `metadata`."""
        form = request.form
        vectors = pooled.vectors
        if form.encoding not in ("bytes", "bytes_only"):
            return super().reply(request, id, pooled)
        parts = [packed(vector, form) for vector in vectors]
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if form.encoding == "bytes":
            metadata = {
                "id": id,
                "created": int(time.time()),
                "model": request.options.model,
                "data": places(vectors, parts, form),
                "usage": pooled.usage,
            }
            headers = ((b"metadata", json.dumps(metadata, separators=(",", ":")).encode()),)
        return Reply(b"".join(parts), BYTES, headers)


class Embeddings(VectorEndpoint):
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


class Pooling(VectorEndpoint):
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
        """See `requests.read_inputs`; classes are numbers in JSON."""
        one_of(body, "encoding_format", ("float",))
        refuse_unsupported(body, OF_BYTES)
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
    if form.encoding == "float":
        return np.ascontiguousarray(vector.astype(EMBED_DTYPES[form.dtype])).astype(np.float32)
    return base64.b64encode(packed(vector, form)).decode()


def packed(vector: np.ndarray, form: Form) -> bytes:
    """The numbers in their type and order of bytes."""
    rounded = np.ascontiguousarray(vector.astype(EMBED_DTYPES[form.dtype]))
    size = rounded.itemsize
    words: bytes = (
        rounded.view(f"u{size}").astype(f"{ENDIANNESS[form.endianness]}u{size}").tobytes()
    )
    return words


def places(
    vectors: Sequence[np.ndarray], parts: Sequence[bytes], form: Form
) -> list[dict[str, Any]]:
    """What each of `parts` is, which lie one after the other."""
    return [
        {
            "index": index,
            "embed_dtype": form.dtype,
            "endianness": form.endianness,
            "start": end - len(part),
            "end": end,
            "shape": vector.shape,
        }
        for index, (vector, part, end) in enumerate(
            zip(vectors, parts, accumulate(map(len, parts)), strict=True)
        )
    ]
