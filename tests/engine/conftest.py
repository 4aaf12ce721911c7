"""A tiny model with random weights, and ways to run prompts through an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.engine.startup.report import Report
from jaxllm.logprobs import prompt_entries, unpacked
from jaxllm.messages import GenerateRequest, PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.processor_arguments import Function
from tests.engine.few_shapes import few_shapes

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 104,  # divides by 8, so that tensor parallelism splits it
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "attention_bias": False,
    # So many that a random model says one soon; prompts use the ids below
    "eos_token_id": [96, 97, 98, 99, 100, 101, 102, 103],
}
LOGPROB_BOUND = 1e-4


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the config of a tiny model; its weights are made at load."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return str(path)


def write_random(path: Path, repo: Path) -> str:
    """A model with random weights and the built-in model's tokenizer, more logits than it has
    tokens, and two ends of sequence."""
    (path / "config.json").write_text(
        json.dumps(
            TINY | {"vocab_size": 800, "eos_token_id": [759, 761], "max_position_embeddings": 4096}
        )
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(repo / "jaxllm" / "demo" / name, path / name)
    return str(path)


@pytest.fixture(scope="session")
def every_shape(tiny_dir: str) -> Callable[..., Engine]:
    """An engine around the tiny model with all the shapes that a configuration has; keywords
    override the configuration."""

    def make(
        processors: Sequence[Function] = (),
        report: Report | None = None,
        leave_late: bool = False,
        **overrides: Any,
    ) -> Engine:
        wishes: dict[str, Any] = {
            "model": tiny_dir,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "num_gpu_blocks_override": 96,
            "enforce_eager": True,
        }
        return load_engine(EngineConfig(**(wishes | overrides)), report, processors, leave_late)

    return make


@pytest.fixture(scope="session")
def make_engine(every_shape: Callable[..., Engine]) -> Callable[..., Engine]:
    """The same with few shapes: for tests that are not about them."""

    def make(*given: Any, **overrides: Any) -> Engine:
        with few_shapes():
            return every_shape(*given, **overrides)

    return make


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Every prompt at once through the engine; the tokens of each one's first choice."""
    per_prompt = params if isinstance(params, list) else [params] * len(prompts)
    out = collect(
        engine,
        [
            GenerateRequest(id=str(i), prompt=Prompt(p), params=s)
            for i, (p, s) in enumerate(zip(prompts, per_prompt, strict=True))
        ],
    )
    return [tokens_of(out, str(i)) for i in range(len(prompts))]


def collect(engine: Engine, requests: list[GenerateRequest]) -> list[TextDelta]:
    """Add requests and step until nothing is left."""
    for request in requests:
        engine.add(request)
    deltas: list[TextDelta] = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def tokens_of(deltas: list[TextDelta], request_id: str, index: int = 0) -> list[int]:
    """The tokens of one choice."""
    return [t for d in deltas if d.id == request_id and d.index == index for t in d.token_ids]


def entries_of(deltas: Sequence[TextDelta]) -> list[TokenLogprobs]:
    """The log-probabilities of all their tokens."""
    return [
        entry
        for delta in deltas
        if delta.logprobs is not None
        for entry in unpacked(delta.logprobs, delta.token_ids)
    ]


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """One for the tests of a module, which leave nothing behind in it."""
    engine = make_engine()
    yield engine
    engine.scheduler.check()
    assert not engine.has_work and engine.stats().free_pages == engine.stats().num_pages


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Programs are kept in a folder of the test's own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@dataclass(frozen=True)
class Outcome:
    """What became of one choice."""

    tokens: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]
    # Without the names of the prompt's tokens
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Sequence[TextDelta], request_id: str, index: int = 0) -> Outcome:
        """From everything an engine said."""
        mine = [d for d in deltas if d.id == request_id and d.index == index]
        entries = entries_of(mine)
        scores = [entry for d in mine if d.prompt_logprobs for entry in nameless(d.prompt_logprobs)]
        return cls(
            [t for d in mine for t in d.token_ids],
            mine[-1].finish_reason,
            mine[-1].stop_reason,
            entries,
            scores,
        )

    def assert_like(self, expected: Outcome) -> None:
        """The same tokens for the same reason, and log-probabilities of the chosen and the
        likeliest tokens within the bound."""
        assert (self.tokens, self.finish_reason, self.stop_reason) == (
            expected.tokens,
            expected.finish_reason,
            expected.stop_reason,
        )
        assert_same_logprobs(self.logprobs, expected.logprobs)
        assert_same_logprobs(self.prompt_logprobs, expected.prompt_logprobs)


def nameless(found: PromptLogprobs) -> list[TokenLogprobs]:
    """The entries of a prompt that is not at hand."""
    return list(prompt_entries(found, [0] * (1 + len(found.packed) // (8 + 8 * found.top))))


def assert_same_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Position by position: ids and ranks equal, values within the bound."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank, [i for i, _ in one.top]) == (
            other.token_id,
            other.rank,
            [i for i, _ in other.top],
        )
        values = (
            [one.logprob, *(v for _, v in one.top)],
            [other.logprob, *(v for _, v in other.top)],
        )
        np.testing.assert_allclose(*values, atol=LOGPROB_BOUND, rtol=0)


def outcomes(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Outcome]:
    """Every prompt at once through the engine; what became of each one's first choice."""
    requests = [
        GenerateRequest(id=str(i), prompt=Prompt(p), params=s)
        for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    deltas = collect(engine, requests)
    return [Outcome.of(deltas, str(i)) for i in range(len(prompts))]


class Numbers:
    """A tokenizer of texts like "12 13"; a space before changes no token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


def reading_words(engine: Engine) -> Engine:
    """The engine, taking bad words that are written as the numbers of their tokens."""
    engine._options._tokenizer = Numbers()  # type: ignore[assignment]
    return engine
