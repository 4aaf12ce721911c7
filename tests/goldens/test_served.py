"""The engine serves every golden checkpoint with the tokens and log-probabilities of transformers:
prompts together and alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.logprobs import prompt_entries, unpacked
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Outcome, collect, run
from tests.engine.fake_host import Optimist
from tests.engine.few_shapes import few_shapes
from tests.goldens.cases import CASES, NEW_TOKENS, PROMPT_LENGTHS
from tests.goldens.golden import Continuation, golden_names, load_golden
from tests.memory_maps import release
from tests.weights.packed import MXFP4, mxfp4_pair, write

BOUND = 2e-4
GREEDY = SamplingParams(
    temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=2
)
TOKENS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
# The others take the same paths; windows have tests of their own
FAST = ("qwen3-dynamic",)
CHEAP = ("deepseek-v2-lite",)
PAGE = 8
SMALL = {"num_gpu_blocks_override": -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // PAGE) + 3}


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Engines of all goldens have more executables than a process may map."""
    yield
    release()


def engine(directory: Path, **overrides: Any) -> Engine:
    wishes: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": max(PROMPT_LENGTHS) + NEW_TOKENS,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": PAGE,
        "num_gpu_blocks_override": 96,
        "enforce_eager": True,
    }
    with few_shapes():
        return load_engine(EngineConfig(**(wishes | overrides)))


def check(core: Engine, continuations: tuple[Continuation, ...]) -> None:
    """Run the prompts at once; tokens must be equal and the logprobs of tokens and runners-up
    close."""
    for i, expected in enumerate(continuations):
        core.add(GenerateRequest(id=str(i), prompt=Prompt(expected.prompt), params=GREEDY))
    deltas: list[TextDelta] = []
    while core.has_work:
        deltas += core.step()
    for i, expected in enumerate(continuations):
        mine = [delta for delta in deltas if delta.id == str(i)]
        found = [
            entry for delta in mine for entry in unpacked(delta.logprobs or b"", delta.token_ids)
        ]
        assert [entry.token_id for entry in found] == expected.tokens
        for entry, row in zip(found, expected.logprobs, strict=True):
            ids = [entry.token_id, *(token for token, _ in entry.top)]
            np.testing.assert_allclose(
                [entry.logprob, *(value for _, value in entry.top)], row[ids], atol=BOUND, rtol=0
            )
            assert {token for token, _ in entry.top[:1]} == {int(row.argmax())}
        assert mine[0].prompt_logprobs is not None
        inside = [
            entry.logprob for entry in prompt_entries(mine[0].prompt_logprobs, expected.prompt)
        ]
        np.testing.assert_allclose(inside, expected.prompt_logprobs, atol=BOUND, rtol=0)


def check_tokens(core: Engine, continuations: tuple[Continuation, ...]) -> None:
    """The same of prompts whose own log-probabilities are not asked for, so that their pages may
    be cached ones."""
    requests = [
        GenerateRequest(id=str(i), prompt=Prompt(one.prompt), params=TOKENS)
        for i, one in enumerate(continuations)
    ]
    deltas = collect(core, requests)
    for i, one in enumerate(continuations):
        found = Outcome.of(deltas, str(i))
        assert found.tokens == one.tokens
        expected = [row[token] for token, row in zip(one.tokens, one.logprobs, strict=True)]
        np.testing.assert_allclose(
            [entry.logprob for entry in found.logprobs], expected, atol=BOUND, rtol=0
        )
    core.scheduler.check()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in CHEAP else [pytest.mark.slow]) for n in golden_names()],
)
def test_chunked_preempted_and_cached_prompts_equal_transformers(name: str) -> None:
    golden = load_golden(name)
    core = engine(golden.directory, max_num_batched_tokens=16, **SMALL)
    core.scheduler.estimator = Optimist()
    check_tokens(core, golden.continuations[::-1])  # the longest and the next do not fit when grown
    # Windows on every layer leave few pages behind: test_windows.py
    assert core.stats().preemptions > 0 or None not in core.resolved.windows
    if any(core.resolved.windows):  # of which so small a pool keeps too little for a later prompt
        core = engine(golden.directory, max_num_batched_tokens=16)
    last, hits = golden.continuations[-1:], core.stats().prefix_hits
    check_tokens(core, last)
    check_tokens(core, last)
    if core.resolved.enable_prefix_caching:  # dynamic RoPE shares nothing
        assert core.stats().prefix_hits - hits >= (len(last[0].prompt) - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in golden_names()]
)
def test_prompts_served_together_and_alone_equal_transformers(name: str) -> None:
    golden = load_golden(name)
    core = engine(golden.directory)
    check(core, golden.continuations)
    for continuation in golden.continuations:
        check(core, (continuation,))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", golden_names())
def test_an_engine_over_devices_equals_transformers_or_says_what_does_not_divide(
    name: str, shards: int
) -> None:
    golden = load_golden(name)
    try:
        core = engine(golden.directory, tensor_parallel_size=shards)
    except ConfigError as error:
        if "divide" not in str(error) or "\n" in str(error):
            raise
        pytest.skip(str(error))
    check(core, golden.continuations)


MIXTURES = [name for name in golden_names() if any("experts" in key for key in CASES[name])]


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "shards"), [(2, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_may_be_split_over_devices_whole_and_by_their_width(
    name: str, groups: int, shards: int
) -> None:
    golden = load_golden(name)
    try:
        core = engine(
            golden.directory,
            tensor_parallel_size=groups * shards,
            expert_parallel_size=groups,
        )
    except ConfigError as error:
        if "divide" not in str(error) or "\n" in str(error):
            raise
        pytest.skip(str(error))
    assert core.runner.programs.shapes.model.mesh.shape["expert"] == groups
    check(core, golden.continuations)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_experts_are_split_in_each_of_several_stages(groups: int) -> None:
    golden, split = load_golden("qwen2-moe-fused-normalised"), {"expert_parallel_size": groups}
    core = engine(golden.directory, tensor_parallel_size=2, pipeline_parallel_size=2, **split)
    check(core, golden.continuations)


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["int4", "fp8_w8a16", "int8_w8a16", "mxfp4"])
def test_experts_in_few_bits_give_the_same_tokens_over_devices(wish: str, tmp_path: Path) -> None:
    golden = load_golden("qwen2-moe-fused-normalised")
    path, options = golden.directory, {"quantization": wish}
    if wish == "mxfp4":  # is no wish, but how a checkpoint stores them
        pair = mxfp4_pair()
        path = write(tmp_path / "a", pair.config | {"quantization_config": MXFP4}, pair.packed)
        options = {}

    def tokens(devices: int, groups: int) -> list[list[int]]:
        split = {"tensor_parallel_size": devices, "expert_parallel_size": groups}
        core = engine(path, **options, **split)
        return run(core, [c.prompt for c in golden.continuations], GREEDY)

    alone = tokens(1, 1)
    assert all(tokens(*each) == alone for each in ((2, 2), (2, 1), (4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-mqa-tied-linear", "qwen2-window-mha"])
def test_an_engine_over_eight_devices_equals_transformers(name: str) -> None:
    golden = load_golden(name)
    check(engine(golden.directory, tensor_parallel_size=8), golden.continuations)


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_names())
def test_an_engine_in_stages_equals_transformers(name: str) -> None:
    golden = load_golden(name)
    check(engine(golden.directory, pipeline_parallel_size=2), golden.continuations)


def test_keys_that_hold_positions_are_not_kept_in_8_bits() -> None:
    with pytest.raises(ConfigError, match="keys hold positions"):
        engine(load_golden("falcon-alibi").directory, kv_cache_dtype="fp8")
