"""Weights in 8 bits through the whole engine: its greedy tokens are those of the model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams, models, weights
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from tests.weights.packed import FP8, fp8_pair, write

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPTS = [[3, 5, 7, 9, 11], [1, 2, 3], [40, 2, 40, 2, 8, 6, 4]]
TOKENS = 6


def greedy(path: Path, wish: str | None, prompt: list[int]) -> list[int]:
    spec = models.read_spec(path)
    spec = replace(spec, formats=weights.weight_formats(path, spec, wish))
    assert spec.formats
    model = nnx.merge(*weights.load(path, weights.outline(spec, make_mesh(1), jnp.float32)))
    ids = list(prompt)
    for _ in range(TOKENS):
        token_T = jnp.array(ids)
        context = DenseContext()
        hidden_TD = model(token_T, jnp.arange(len(ids)), context)
        ids.append(int(model.logits(hidden_TD[-1:], context).argmax()))
    return ids[len(prompt) :]


def checkpoint(tmp_path: Path, name: str) -> tuple[Path, str | None]:
    if name != "blocks":
        return GOLDENS / "llama-gqa", name
    pair = fp8_pair("llama-gqa")
    return write(tmp_path / "a", pair.config | {"quantization_config": FP8}, pair.packed), None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"), [("fp8", 1), ("int8", 1), ("blocks", 1), ("fp8_w8a16", 2)]
)
def test_tokens_are_those_of_the_model_alone(tmp_path: Path, name: str, shards: int) -> None:
    assert len(jax.devices()) >= shards
    path, wish = checkpoint(tmp_path, name)
    llm = LLM(
        str(path),
        quantization=wish,
        skip_tokenizer_init=True,
        tensor_parallel_size=shards,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert found == [greedy(path, wish, prompt) for prompt in PROMPTS]
