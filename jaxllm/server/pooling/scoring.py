"""The routes that compare texts: scores of pairs, and documents in the order of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.messages import RequestError
from jaxllm.pooled import check_labels, cosine, pair_count
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.pooling.endpoint import PoolingEndpoint, listing
from jaxllm.server.pooling.requests import SHARED_FIELDS, Options, read_options, read_texts
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.fields import read_field, read_optional
from jaxllm.server.requests.limits import MAX_PROMPTS, Rules
from jaxllm.tokenizer import Pair, Tokenizer

# Names of the two sides of a score
SIDES = (
    ("queries", "documents"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "items"),
)
SCORE_FIELDS = SHARED_FIELDS | {name for pair in SIDES for name in pair}
RERANK_FIELDS = SHARED_FIELDS | {
    *("query", "documents", "top_n", "max_tokens_per_doc", "return_documents")
}
PAIR_BODY = BodyFields(sizes=dict.fromkeys(("query", *(name for pair in SIDES for name in pair))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """Texts to compare, pair by pair.

    Attributes:
        names: the fields of the body that left and right are from.
        most_of_right: tokens of a right text that are read; None for all.
        top: how many results are returned; None for all.
    """

    options: Options
    names: tuple[str, str]
    left: list[str]
    right: list[str]
    most_of_right: int | None = None
    top: int | None = None


class PairEndpoint(PoolingEndpoint):
    """A route whose prompts are pairs of texts, or the texts of pairs where the model embeds."""

    param = "documents"

    def field(self, request: PairRequest, index: int) -> str:
        """Of two texts that are read together the right one's, which may be cut."""
        embeds = request.options.pooling.task == "embed"
        return request.names[not (embeds and index < len(request.left))]

    async def tokenise(self, request: PairRequest) -> list[Pair]:
        """A classifier reads the two texts of a pair together."""
        params = request.options.params
        limit = self._state.resolved.max_model_len
        length = params.length(limit)
        most = request.most_of_right

        def encode(tokenizer: Tokenizer) -> list[Pair]:
            if request.options.pooling.task == "classify":
                left = request.left * (len(request.right) // len(request.left))
                pairs = zip(left, request.right, strict=True)
                return [
                    tokenizer.encode_pair(left_text, right_text, length, most)
                    for left_text, right_text in pairs
                ]
            if length is None:
                within = most
            elif most is None:
                within = length
            else:
                within = min(most, length)
            sides = (request.left, length), (request.right, within)
            return [Pair(ids) for side in sides for ids in tokenizer.encode_all(*side)]

        return await self.encoded(encode)

    def scores(self, request: PairRequest, vectors: Sequence[np.ndarray]) -> list[float]:
        """The score of each pair."""
        if request.options.pooling.task == "classify":
            return [float(vector[0]) for vector in vectors]
        left = vectors[: len(request.left)]
        right = vectors[len(request.left) :]
        left = [*left] * (len(right) // len(left))
        return [
            cosine(left_vector, right_vector)
            for left_vector, right_vector in zip(left, right, strict=True)
        ]


class Score(PairEndpoint):
    """POST /score, /v1/score"""

    prefix = "score"
    fields = SCORE_FIELDS

    def parse(self, body: dict[str, Any]) -> PairRequest:
        """The two sides under any of their names. Raises ApiError."""
        names = next((pair for pair in SIDES if all(body.get(n) is not None for n in pair)), None)
        if names is None:
            raise bad_request(
                "queries and documents are required, or text_1 and text_2, or data_1 and data_2",
                "queries",
            )
        return read_pairs(body, self._state.rules, *names)

    def full_reply(self, request: PairRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """vLLM's form."""
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(self.scores(request, vectors))
        ]
        return listing(data)


class Rerank(PairEndpoint):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    prefix = "rerank"
    fields = RERANK_FIELDS

    def parse(self, body: dict[str, Any]) -> PairRequest:
        """One query and its documents. Raises ApiError."""
        if isinstance(body.get("query"), list):
            raise bad_request(f"query must be a text, got {describe(body['query'])}", "query")
        most = read_optional(body, "max_tokens_per_doc", int)
        if most is not None and most < 0:
            raise bad_request(
                f"max_tokens_per_doc must be at least 1, or 0 for all, got {most}",
                "max_tokens_per_doc",
            )
        top = read_field(body, "top_n", int, 0)
        if top < 0:
            raise bad_request(f"top_n must be at least 1, or 0 for all, got {top}", "top_n")
        pairs = read_pairs(body, self._state.rules, "query", "documents", most or None)
        return PairRequest(
            options=pairs.options,
            names=pairs.names,
            left=pairs.left,
            right=pairs.right,
            most_of_right=most or None,
            top=top or None,
        )

    def full_reply(self, request: PairRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """Jina's and Cohere's form: the best first."""
        scores = self.scores(request, vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top]
        results = [
            {
                "index": index,
                "document": {"text": request.right[index]},
                "relevance_score": scores[index],
            }
            for index in order
        ]
        return {"results": results}


def read_pairs(
    body: dict[str, Any], rules: Rules, left_name: str, right_name: str, most: int | None = None
) -> PairRequest:
    """The texts of two fields, which pair: one with each, or each with its own. Raises ApiError."""
    options = read_options(body, rules, "embed", "classify")
    cut = options.params.truncate_prompt_tokens is not None
    for name in (left_name, right_name):
        if body.get(name) is None:
            raise bad_request(f"{name} is required", name)
    left = read_texts(body[left_name], rules, left_name, cut)
    right = read_texts(body[right_name], rules, right_name, cut or most is not None)
    try:
        pair_count(len(left), len(right))
        if options.pooling.task == "classify":
            check_labels(options.pooling)
    except RequestError as error:
        raise bad_request(str(error), left_name, error.code) from None
    if len(left) + len(right) > MAX_PROMPTS + 1:
        raise bad_request(f"at most {MAX_PROMPTS} texts per request", right_name)
    return PairRequest(
        options=options, names=(left_name, right_name), left=left, right=right, most_of_right=most
    )
