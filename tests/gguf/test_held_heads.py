"""Heads of 8 bits stay so on the devices, tied ones too, and give the logits of their plain
numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest
from jaxllm.models.config.build import outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.weight.protocol import Shape
from jaxllm.nn.weight.scaled import Scaled
from jaxllm.pooled import PoolingParams
from jaxllm.prompt import Prompt
from jaxllm.quantisation import WeightFormat
from jaxllm.sampling.options import SamplingParams
from pallas_kernels.scaled_matmul import choose
from tests.engine.conftest import Outcome, collect
from tests.engine.pooled_goldens import make, pool
from tests.gguf.test_held import HEAD, HELD, TABLE, TIED, check, file
from tests.gguf.writer import Q4_K, Q5_0, Q5_K, Q6_K, Q8_0
from tests.goldens.pooled_cases import CASES as SCORED
from tests.goldens.test_served import engine
from tests.targets import H200

ENDS = {TABLE: Q6_K, HEAD: Q6_K}
PROMPTS = [[3, 5, 7, 9, 11], [1, 2, 3], [40, 2, 40, 2, 8, 6, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.mark.parametrize(
    ("number", "case", "architecture", "shards"),
    [
        (Q6_K, "llama-gqa", "llama", 1),
        (Q6_K, TIED, "llama", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (Q8_0, "llama-gqa", "llama", 2),
                (Q5_0, TIED, "llama", 1),
                (Q8_0, "gemma2-window", "gemma2", 1),
                (Q5_K, "llama-gqa", "llama", 1),
                (Q4_K, "llama-gqa", "llama", 1),
            )
        ),
    ],
)
def test_a_head_of_8_bits_stays_so(
    number: int, case: str, architecture: str, shards: int, tmp_path: Path
) -> None:
    ends = {TABLE: number, HEAD: number}
    directory, spec, wanted = file(tmp_path, case, architecture, lambda name: Q8_0, ends)
    name = "model.embed_tokens" if spec.tied else "lm_head"
    kept = number in (Q6_K, Q8_0, Q5_0)  # others have offsets, or 4 bits
    assert spec.formats.get(name) == (HELD[number] if kept else None)
    check(directory, spec, wanted, shards)


@pytest.mark.parametrize("case", ["llama-gqa", pytest.param(TIED, marks=pytest.mark.slow)])
def test_a_vocabulary_that_devices_do_not_share_is_whole_on_each(case: str, tmp_path: Path) -> None:
    ends = {TABLE: Q6_K, HEAD: Q6_K}
    directory, spec, wanted = file(tmp_path, case, "llama", lambda name: Q4_K, ends, vocab_size=67)
    assert HELD[Q6_K] in spec.formats.values()
    check(directory, spec, wanted, shards=2)


@pytest.mark.parametrize(
    ("case", "vocab", "shards"),
    [
        ("llama-gqa", 98, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((TIED, 98, 2), ("llama-gqa", 100, 4), (TIED, 300, 4))
        ),
    ],
)
def test_shares_that_no_kernel_takes_are_filled_up(
    case: str, vocab: int, shards: int, tmp_path: Path
) -> None:
    directory, spec, wanted = file(
        tmp_path, case, "llama", lambda name: Q4_K, ENDS, vocab_size=vocab
    )
    model = outline(spec, shards, jnp.float32)
    head = model.embed if spec.tied else model.head
    rows, columns = head.weight.values.shape
    assert rows // shards == vocab // shards + -(vocab // shards) % 64
    x = jnp.zeros((1, columns), jnp.bfloat16)
    share = jax.ShapeDtypeStruct((rows // shards, columns), jnp.int8)
    scale = jax.ShapeDtypeStruct((rows // shards, columns // 16), jnp.float16)
    assert choose(H200, x, share, scale, 16, "plain") == "mosaic_gpu"
    check(directory, spec, wanted, shards)


def test_a_head_of_columns_that_no_kernel_takes_becomes_plain(tmp_path: Path) -> None:
    directory, spec, wanted = file(
        tmp_path,
        "llama-gqa",
        "llama",
        lambda name: Q8_0,
        {TABLE: Q8_0, HEAD: Q8_0},
        hidden_size=192,
    )
    assert "model.embed_tokens" in spec.formats and "lm_head" not in spec.formats
    check(directory, spec, wanted)


@pytest.mark.parametrize(
    ("case", "wishes", "more"),
    [
        (TIED, {"tensor_parallel_size": 2}, {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("llama-gqa", {"tensor_parallel_size": 2}, {}),
                ("llama-gqa", {}, {"vocab_size": 67}),
                ("llama-gqa", {"tensor_parallel_size": 2}, {"vocab_size": 98}),
                (TIED, {"tensor_parallel_size": 2}, {"vocab_size": 98}),
                ("gemma2-window", {"tensor_parallel_size": 4}, {"vocab_size": 300}),
                (TIED, {"tensor_parallel_size": 2}, {"vocab_size": 67}),
                (TIED, {"pipeline_parallel_size": 2}, {}),
                ("llama-gqa", {"pipeline_parallel_size": 2}, {"vocab_size": 67}),
                ("gemma2-window", {"tensor_parallel_size": 4}, {}),
            )
        ),
    ],
)
def test_an_engine_gives_the_tokens_and_log_probabilities_of_plain_numbers(
    case: str, wishes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    architecture = "gemma2" if "gemma" in case else "llama"
    packed, spec, plain = file(tmp_path, case, architecture, lambda name: Q8_0, ENDS, **more)
    assert HELD[Q6_K] in spec.formats.values()
    found, wanted = (served(path, wishes) for path in (packed, plain))
    for one, other in zip(found, wanted, strict=True):
        one.assert_like(other)


def served(directory: Path, wishes: dict[str, Any]) -> list[Outcome]:
    core = engine(directory, **wishes)
    requests = [
        GenerateRequest(id=str(i), prompt=Prompt(prompt), params=GREEDY)
        for i, prompt in enumerate(PROMPTS)
    ]
    deltas = collect(core, requests)
    return [Outcome.of(deltas, str(i)) for i in range(len(PROMPTS))]


def test_weights_with_a_head_do_not_replace_those_of_a_table_that_is_the_head(
    tmp_path: Path,
) -> None:
    for name in ("tied", "apart"):
        (tmp_path / name).mkdir()
    _, spec, _ = file(tmp_path / "tied", TIED, "llama", lambda name: Q8_0, ENDS)
    apart, other, _ = file(
        tmp_path / "apart", TIED, "llama", lambda name: Q8_0, ENDS, tie_word_embeddings=False
    )
    assert spec.tied and not other.tied
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        weights.check(apart, weights.outline(spec, make_mesh(1), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "shards"), [(TIED, 2), (TIED, 1), ("llama-gqa", 2)])
def test_scores_of_single_tokens_are_those_of_plain_numbers(
    case: str, shards: int, tmp_path: Path
) -> None:
    packed, _, plain = file(tmp_path, case, "llama", lambda name: Q4_K, ENDS)
    found = []
    for directory in (packed, plain):
        (directory / "1_LogitScore").mkdir()
        for name, content in SCORED["qwen3-logit-score"].items():
            if name != "config.json":
                (directory / name).write_text(json.dumps(content))
        core = make(directory, tensor_parallel_size=shards)
        rows = [leaf.dtype for leaf in core.runner.weights if leaf.shape in ((96, 256), (128, 256))]
        assert jnp.int8 in rows or directory == plain
        found.append(pool(core, PROMPTS, PoolingParams(use_activation=False)))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert np.abs(found[1]).max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "dtype", "wanted"),
    [
        (HELD[Q6_K], "bfloat16", "float16"),
        (HELD[Q5_K], "float16", "float16"),
        (HELD[Q6_K], "float32", "float32"),
        (WeightFormat("int8", 16), "bfloat16", "float32"),  # whose scales may be below float16's
        (WeightFormat("fp8", 32), "bfloat16", "float32"),
    ],
)
def test_scales_that_are_multiples_of_float16s_have_16_bits_where_the_model_has(
    kind: WeightFormat, dtype: str, wanted: str
) -> None:
    shape = Shape((64,), (256,), (None, "embed"), dtype=jnp.dtype(dtype))
    assert Scaled(kind, shape).scale.get_value().dtype == jnp.dtype(wanted)


def test_rows_in_16_bits_are_those_of_exact_scales_rounded_once_more() -> None:
    rng, kind = np.random.default_rng(0), HELD[Q6_K]
    numbers = rng.integers(-32, 32, (64, 256)).astype(np.int8)
    scale = rng.uniform(1e-5, 1e-3, (64, 16)).astype(np.float32)
    exact = numbers * np.repeat(scale, 16, axis=1)
    x = rng.standard_normal((3, 256)).astype(jnp.bfloat16)
    held = Scaled(kind, Shape((64,), (256,), (None, "embed"), dtype=jnp.bfloat16))
    held.values[...], held.scale[...] = jnp.asarray(numbers), jnp.asarray(scale, jnp.float16)
    rows = held.looked_up(jnp.arange(64), DenseContext(), 64)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_allclose(rows.astype(np.float32), exact, rtol=2**-8 + 2**-11, atol=1e-6)
    sums = held.sums(jnp.asarray(x), DenseContext())
    assert sums.dtype == jnp.float32
    wanted = x.astype(np.float32) @ np.asarray(rows).astype(np.float32).T
    np.testing.assert_allclose(sums, wanted, atol=1e-6)
