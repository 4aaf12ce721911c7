"""What `LLM` does with a model that pools: embeddings, classes, scores. Arguments and results have
vLLM's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.library.driver import Driver
from jaxllm.library.inputs import PromptType, as_list, cache_salt, text_or_ids
from jaxllm.library.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledRequestOutput,
    PoolingOutput,
    ScoringOutput,
)
from jaxllm.messages import PoolingRequest, RequestError, TextDelta
from jaxllm.pooled import (
    PoolingParams,
    check_labels,
    check_params,
    check_task,
    cosine,
    pair_count,
    result,
)
from jaxllm.pooling import TASKS
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.tokenizer import Pair, Tokenizer

# Token ids of a prompt, with the first token of a second text, and its cache salt
type Encoded = tuple[Pair, str | None]


class PoolingCalls:
    """The calls of `LLM` for pooling models."""

    engine: Engine | PoolingEngine
    _driver: Driver
    _ids: itertools.count[int]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PooledRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, in order: `outputs.data` is a float32 vector, an
        embedding or a number for each class; or `[tokens, E]`, one for each token.

        Args:
            prompts: as of `LLM.generate`.
            pooling_params: of all prompts.
            pooling_task: of `jaxllm.pooling.TASKS`, what the caller expects; None takes what the
                model gives. `pooler_config={"task": "token_embed"}` starts it for another task.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: a prompt cannot run, or the model generates; none has started.
        """
        tasks: tuple[str, ...] = TASKS
        if pooling_task is not None:
            tasks = (pooling_task,)
        params = self._checked(pooling_params, *tasks)
        return self._pool(self._encoded(prompts, params), params, PoolingOutput, use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """The embedding of each prompt: `outputs.embedding` is a list of floats.

        Arguments and errors are those of `encode`.
        """
        params = self._checked(pooling_params, "embed")
        made = lambda vector: EmbeddingOutput(vector.tolist())
        return self._pool(self._encoded(prompts, params), params, made, use_tqdm)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """The classes of each prompt: `outputs.probs` has a number for each label.

        Arguments and errors are those of `encode`.
        """
        params = self._checked(pooling_params, "classify")
        made = lambda vector: ClassificationOutput(vector.tolist())
        return self._pool(self._encoded(prompts, params), params, made, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        """How well each text of `data_2` fits `data_1`, one for all or one for each:
        `outputs.score`.

        A model with one label reads both texts as a pair; an embedding model gives the cosine of
        their vectors. Raises RequestError as `encode`, and when the texts do not pair.
        """
        params = self._checked(pooling_params, "embed", "classify")
        pooling = check_task(self.engine.resolved.pooling, "embed", "classify")
        left, right = ([d] if isinstance(d, str) else list(d) for d in (data_1, data_2))
        count = pair_count(len(left), len(right))
        if len(left) == 1:
            left = left * count
        if pooling.task == "classify":
            check_labels(pooling)
            limit = params.length(self.engine.resolved.max_model_len)
            pairs = [
                (self._reader().encode_pair(first, second, limit), None)
                for first, second in zip(left, right, strict=True)
            ]
            scored = lambda vector: ScoringOutput(float(vector[0]))
            return self._pool(pairs, params, scored, use_tqdm)
        vectors = self._pool(
            self._encoded([*left, *right], params), params, PoolingOutput, use_tqdm
        )
        return [
            second.of(ScoringOutput(cosine(first.outputs.data, second.outputs.data)))
            for first, second in zip(vectors[:count], vectors[count:], strict=True)
        ]

    def _pool[T](
        self,
        prompts: Sequence[Encoded],
        params: PoolingParams,
        made: Callable[[np.ndarray], T],
        use_tqdm: bool,
    ) -> list[PooledRequestOutput[T]]:
        """Run prompts; each output is what is `made` of the float32 vector that the params ask
        for, while the device computes others."""
        pooling = self.engine.resolved.pooling
        drawn = SamplingParams(max_tokens=1)
        assert pooling is not None
        requests = [
            PoolingRequest(
                id=f"pooled-{next(self._ids)}",
                prompt=Prompt(ids),
                params=drawn,
                cache_salt=salt,
                second_text=second,
            )
            for (ids, second), salt in prompts
        ]
        results: dict[str, tuple[T, int]] = {}
        failed: list[str | None] = []

        def add_delta(delta: TextDelta) -> bool:
            if delta.pooled is None:
                failed.append(delta.error)
            else:
                outputs = made(result(pooling, delta.pooled, params))
                results[delta.id] = outputs, delta.num_cached_tokens
            return True

        with self._driver.turn():
            for request in requests:
                self.engine.validate(request)
            self._driver.run(requests, add_delta, use_tqdm)
        if failed:
            raise RequestError(failed[0] or "the engine gave no result", None, "failed")
        return [
            PooledRequestOutput(request.id, request.prompt.tokens, *results[request.id])
            for request in requests
        ]

    def _checked(self, pooling_params: PoolingParams | None, *tasks: str) -> PoolingParams:
        """The params of a call. Raises RequestError when the model does none of `tasks`."""
        params = pooling_params or PoolingParams()
        resolved = self.engine.resolved
        check_params(check_task(resolved.pooling, *tasks), params, resolved.max_model_len)
        return params

    def _encoded(
        self, prompts: PromptType | Sequence[PromptType], params: PoolingParams
    ) -> list[Encoded]:
        limit = self.engine.resolved.max_model_len
        listed = as_list(prompts)
        pairs = [text_or_ids(prompt) for prompt in listed]
        texts = [text or "" for text, ids in pairs if ids is None]
        within = params.length(limit), params.truncation_side
        read = iter(self._reader().encode_all(texts, *within) if texts else ())
        return [
            (Pair(params.truncated(next(read) if ids is None else ids, limit)), cache_salt(prompt))
            for prompt, (_, ids) in zip(listed, pairs, strict=True)
        ]

    def _reader(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ConfigError("this needs a tokenizer; construct LLM without skip_tokenizer_init")
        return self.engine.tokenizer
