"""From what the device pools to what clients get: shorter vectors, length one, probabilities.
Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxllm.messages import RequestError
from jaxllm.pooling import EMBEDDINGS, Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of a pooling request, under vLLM's names.

    Attributes:
        dimensions: elements that an embedding is cut to, before it is scaled to length one.
        use_activation: whether an embedding has length one, and classes their probabilities; None
            for what the model says.
        truncate_prompt_tokens: tokens of a prompt to keep; -1 for the model's limit.
        truncation_side: where the others are cut off, "right" or "left".
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"

    def length(self, limit: int) -> int | None:
        """Tokens that a prompt is cut to, where the model takes `limit`; None when it is not."""
        if self.truncate_prompt_tokens == -1:
            return limit
        return self.truncate_prompt_tokens

    def truncated(self, ids: list[int], limit: int) -> list[int]:
        """The token ids that are computed of a prompt."""
        count = self.length(limit)
        if count is None or len(ids) <= count:
            return ids
        if self.truncation_side == "right":
            return ids[:count]
        return ids[-count:]


def check_params(pooling: Pooling, params: PoolingParams, limit: int) -> None:
    """Raises RequestError when the model cannot give what the options ask for; it takes `limit`
    tokens."""
    count = params.truncate_prompt_tokens
    wanted = params.dimensions
    if count is not None and (type(count) is not int or not (count == -1 or 1 <= count <= limit)):
        raise RequestError(
            f"truncate_prompt_tokens is {count!r:.40}; it must be -1, or from 1 to {limit}",
            "truncate_prompt_tokens",
        )
    if params.truncation_side not in ("left", "right"):
        raise RequestError(
            f"truncation_side is {params.truncation_side!r:.40}; it must be left or right",
            "truncation_side",
        )
    if wanted is None:
        return
    if pooling.task not in EMBEDDINGS or not pooling.is_matryoshka:
        raise RequestError(
            "dimensions needs an embedding model made for it (is_matryoshka or "
            "matryoshka_dimensions in config.json); leave it out",
            "dimensions",
        )
    if type(wanted) is not int or not 1 <= wanted <= pooling.size:
        raise RequestError(
            f"dimensions is {wanted!r:.40}; it must be a whole number from 1 to {pooling.size}",
            "dimensions",
        )
    if pooling.dimensions and wanted not in pooling.dimensions:
        allowed = ", ".join(map(str, pooling.dimensions))
        raise RequestError(f"dimensions is {wanted}; this model has {allowed}", "dimensions")


def check_task(pooling: Pooling | None, *tasks: str) -> Pooling:
    """The pooling of a model that serves one of `tasks`. Raises RequestError for another one."""
    if pooling is None:
        raise RequestError(
            "this model generates and pools nothing; start it with --runner pooling",
            None,
            "wrong_runner",
        )
    if pooling.task not in tasks:
        output = "classes"
        if pooling.task in EMBEDDINGS:
            output = "embeddings"
        of = "every token" if pooling.of_tokens else "a whole prompt"
        raise RequestError(
            f"this model gives {output} of {of} ({pooling.task}), not what was asked for "
            f"({' or '.join(tasks)}); ask for that, or start it with another task in "
            "--pooler-config, or another model",
            None,
            "wrong_task",
        )
    return pooling


def pair_count(left: int, right: int) -> int:
    """How many pairs these texts make: one with each, or each with its own. Raises RequestError."""
    if not left or not right:
        raise RequestError("there is no pair of texts to score; send at least one", "data_1")
    if left not in (1, right):
        raise RequestError(
            f"{left} texts cannot be paired with {right}; send one, or as many", "data_1"
        )
    return right


def check_labels(pooling: Pooling) -> None:
    """Raises RequestError unless a classifier can score pairs: it has one label."""
    if pooling.size != 1:
        raise RequestError(
            f"scores need a model with one label, this one has {pooling.size}; ask for classes",
            None,
            "wrong_task",
        )


def result(pooling: Pooling, pooled: bytes, params: PoolingParams) -> np.ndarray:
    """The float32 vector that a client gets of what the device pooled; `[tokens, E]` of a task of
    tokens."""
    vector: np.ndarray = np.frombuffer(pooled, np.float32)
    if pooling.of_tokens:
        vector = vector.reshape(-1, pooling.size)
    if pooling.task in EMBEDDINGS:
        vector = vector[..., : params.dimensions]
        if params.use_activation is None:
            wanted = pooling.normalises
        else:
            wanted = params.use_activation
        if wanted:
            return normalised(vector)
        return vector
    if params.use_activation is False:
        return vector
    return ACTIVATIONS[pooling.activation](vector)


def normalised(vector: np.ndarray) -> np.ndarray:
    """The vector, or each row, scaled to length one; zeros stay zeros."""
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    return vector / np.maximum(length, np.float32(1e-12))


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    return float(normalised(left) @ normalised(right))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return (0.5 * (1 + np.tanh(0.5 * logits))).astype(np.float32)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


ACTIVATIONS = {"identity": lambda logits: logits, "sigmoid": _sigmoid, "softmax": _softmax}
