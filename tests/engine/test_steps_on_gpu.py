"""Whole steps on the card: a small model and two layers of real width, against the reference back
end on the same card. Dummy weights depend on the seed alone, so both engines have the same."""

from __future__ import annotations

import json
import random
from typing import Any

import jax
import pytest

from benchmarks.correct_engine import SMALL, compared
from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm import LLM, SamplingParams
from jaxllm.library.outputs import CompletionOutput
from tests.engine.fake_host import Optimist

# One process: engines of several would share the card's memory
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("engines on the card")]

MODELS: dict[str, dict[str, Any]] = {
    "small": SHAPES["tiny"] | SMALL | {"head_dim": 128},
    "7B, two layers": SHAPES["qwen2.5-7b"] | {"num_hidden_layers": 2},
}
TOKENS = 24
LENGTHS = (180, 120, 60, 31)  # all start in SCARCE pages, and three of them soon need another
SCARCE = 7
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
SEEDED: dict[str, Any] = GREEDY | {"temperature": 1.0, "top_p": 0.9}
PROMPT_TOLERANCE = 0.05  # of a log-probability; see `benchmarks.correct_engine.TOLERANCE`


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a config alone."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODELS[request.param] | ALWAYS))
    return str(path)


def make(model: str, **overrides: Any) -> LLM:
    """Prompts need several chunks, and two steps are in flight."""
    usual: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
        "block_size": 64,
        "max_logprobs": 2,
        "enable_prefix_caching": False,
        "enforce_eager": True,  # what no test runs is not compiled
    }
    return LLM(model, **(usual | overrides))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    """An engine with the device's own kernels."""
    return make(model)


@pytest.fixture(scope="module")
def reference(model: str) -> LLM:
    """An engine with attention in plain JAX, over whole prompts, one at a time."""
    wishes = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "async_scheduling": False}
    return make(model, attention_backend="reference", **wishes)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """Prompts of random tokens."""
    rng, vocabulary = random.Random(0), llm.engine.resolved.vocab_size
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]


def answers(llm: LLM, prompts: list[list[int]], **params: Any) -> list[CompletionOutput]:
    """The first choice of each prompt, all prompts at once."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    given = SamplingParams(detokenize=False, **params)
    return [result.outputs[0] for result in llm.generate(inputs, given, use_tqdm=False)]


def test_the_cards_own_kernels_run(llm: LLM, reference: LLM) -> None:
    assert llm.engine.resolved.attention_backend == "mosaic_gpu"
    assert reference.engine.resolved.attention_backend == "reference"


def test_chunks_and_decodes_give_the_references_tokens_and_log_probabilities(
    llm: LLM, reference: LLM, prompts: list[list[int]]
) -> None:
    found, wanted = (answers(each, prompts, logprobs=2, **GREEDY) for each in (llm, reference))
    row = compared(found, wanted)
    assert row["ok"], row


def test_log_probabilities_of_prompts_are_the_references(
    llm: LLM, reference: LLM, prompts: list[list[int]]
) -> None:
    params = SamplingParams(prompt_logprobs=1, detokenize=False, **GREEDY | {"max_tokens": 1})
    for prompt in prompts:
        one, other = (
            each.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            for each in (llm, reference)
        )
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        for token, mine, theirs in zip(
            prompt[1:], one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True
        ):
            assert abs(mine[token].logprob - theirs[token].logprob) < PROMPT_TOLERANCE


def test_pages_and_slot_state_stay_where_they_are_from_step_to_step(
    llm: LLM, prompts: list[list[int]]
) -> None:
    def places() -> list[int]:
        runner = llm.engine.runner
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((runner.kv, runner.state))]

    before = places()
    answers(llm, prompts, **GREEDY)
    answers(llm, prompts, seed=1, **SEEDED)
    assert places() == before


def test_a_seed_draws_the_same_tokens_again(llm: LLM, prompts: list[list[int]]) -> None:
    first, again, other = (
        [list(answer.token_ids) for answer in answers(llm, prompts, seed=seed, **SEEDED)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_processed_logits_keep_to_what_requests_ask_for(llm: LLM, prompts: list[list[int]]) -> None:
    allowed = list(range(5, 40))
    for answer in answers(llm, prompts, allowed_token_ids=allowed, seed=1, **SEEDED):
        assert set(answer.token_ids) <= set(allowed)
    for answer in answers(llm, prompts, logit_bias={7: 100.0}, **GREEDY):
        assert set(answer.token_ids) == {7}
    once = answers(llm, prompts, allowed_token_ids=allowed, presence_penalty=2.0, **GREEDY)
    free = answers(llm, prompts, allowed_token_ids=allowed, **GREEDY)
    for penalised, answer in zip(once, free, strict=True):
        assert len(set(penalised.token_ids)) >= len(set(answer.token_ids))


def test_choices_that_share_their_prompts_pages_answer_as_one_does_alone(
    model: str, llm: LLM, prompts: list[list[int]]
) -> None:
    sharing = make(model, enable_prefix_caching=True)
    params = SamplingParams(n=3, logprobs=2, detokenize=False, **GREEDY)
    wanted = answers(llm, prompts, logprobs=2, **GREEDY)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = sharing.generate(inputs, params, use_tqdm=False)
    for choice in range(3):
        row = compared([result.outputs[choice] for result in results], wanted)
        assert row["ok"], row


@pytest.fixture
def swapping(model: str) -> LLM:
    """An engine with too few pages, which go to host memory."""
    swapping = make(
        model,
        num_gpu_blocks_override=SCARCE,
        preemption_mode="swap",
        swap_space=0.25,
    )
    swapping.engine.scheduler.estimator = Optimist()
    return swapping


def test_pages_that_were_saved_and_loaded_again_change_no_answer(
    swapping: LLM, llm: LLM, prompts: list[list[int]]
) -> None:
    found, wanted = (answers(each, prompts, logprobs=2, **GREEDY) for each in (swapping, llm))
    stats = swapping.engine.stats()
    assert stats.preemptions > 0 and stats.pages_saved > 0 and stats.pages_loaded > 0
    row = compared(found, wanted)
    assert row["ok"], row
