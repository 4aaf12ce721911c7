"""What the files of a model directory say about pooling: wrappers, attention in both directions,
modules of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models import ModelSpec, Wish
from jaxllm.models.config.build import outline
from tests.goldens.cases import CASES
from tests.goldens.pooled_cases import CASES as POOLED

DENSE = Path(__file__).parents[1] / "goldens" / "pooled" / "llama-mean-dense"
LABELS = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}


def read(folder: Path, config: dict[str, Any], wish: Wish | None = None) -> ModelSpec:
    """The spec of a directory with this configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    return models.read_spec(folder, wish)


def test_labels_of_a_wrapper_stand_outside_and_the_width_within(tmp_path: Path) -> None:
    name = {"architectures": ["Gemma3ForSequenceClassification"]}
    pooling = read(tmp_path, CASES["gemma3-vision"] | name | LABELS).pooling
    assert pooling is not None and pooling.labels == ("no", "maybe", "yes")
    assert pooling.maps[0].inputs == CASES["gemma3-vision"]["text_config"]["hidden_size"]


def test_the_width_has_the_familys_own_name_where_the_operator_names_the_pool(
    tmp_path: Path,
) -> None:
    wish = Wish(runner="pooling", pooler={"pooling_type": "MEAN"})
    pooling = read(tmp_path, CASES["gpt2-tied"], wish).pooling
    assert pooling is not None and pooling.size == CASES["gpt2-tied"]["n_embd"]


def test_a_decoder_that_is_not_causal_pools_and_caches_nothing(tmp_path: Path) -> None:
    spec = read(tmp_path, CASES["mistral-window"] | {"is_causal": False})
    assert spec.pooling is not None and spec.pooling.bidirectional
    assert set(spec.windows) == {None}
    with pytest.raises(ConfigError, match="cannot generate; use --runner pooling"):
        read(tmp_path, CASES["mistral-window"] | {"is_causal": False}, Wish(runner="generate"))


def test_windows_of_embedding_gemma_reach_half_as_far_to_either_side(tmp_path: Path) -> None:
    config = POOLED["gemma3_text-both-ways"]["config.json"]
    spec = read(tmp_path, config)
    assert [layer.window for layer in spec.layers] == [config["sliding_window"] // 2, None]


@pytest.mark.parametrize("name", ["gemma2-window", "gpt-oss-fused", "deepseek-v2-lite"])
def test_what_attention_in_both_directions_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    spec = read(tmp_path, CASES[name] | {"is_causal": False})
    with pytest.raises(ConfigError, match="is_causal is false, which is not supported with"):
        outline(spec, 1, "float32")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", ["Transformer", "Pooling", "Normalize", "Dense"], "in this order"),
        ("modules.json", ["Transformer", "Pooling", *["Dense"] * 9], "at most 8 of Dense"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual must be false"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("2_Dense/config.json", {"activation_function": "a.Mish"}, "'Mish' is not one of"),
    ],
    ids=["order", "many", "residual", "input", "activation"],
)
def test_modules_that_are_not_computed_are_refused(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    model = shutil.copytree(DENSE, tmp_path / "model")
    if isinstance(content, list):
        content = [{"type": f"a.{kind}", "path": f"2_{kind}"} for kind in content]
    else:
        content = json.loads((model / name).read_text()) | content
    (model / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        models.read_spec(model)


@pytest.mark.parametrize(
    ("name", "activation"),
    [(None, "tanh"), ("torch.nn.modules.linear.Identity", "identity"), ("torch.nn.ReLU", "relu")],
)
def test_a_dense_module_has_the_activation_of_sentence_transformers(
    name: str | None, activation: str, tmp_path: Path
) -> None:
    model = shutil.copytree(DENSE, tmp_path / "model")
    path = model / "2_Dense" / "config.json"
    config = json.loads(path.read_text())
    del config["activation_function"]
    path.write_text(json.dumps(config if name is None else config | {"activation_function": name}))
    pooling = models.read_spec(model).pooling
    assert pooling is not None and pooling.maps[0].activation == activation


@pytest.mark.parametrize(
    ("file", "config", "found"),
    [
        ({"prompts": {"query": "Q: ", "odd": 1}}, {}, (("query", "Q: "),)),
        ({"prompts": {"query": "Q: "}}, {"task_instructions": {"ask": "A: "}}, (("ask", "A: "),)),
        ({"prompts": ["Q: "]}, {}, ()),
        (None, {}, ()),
    ],
    ids=["sentence-transformers", "config", "odd", "none"],
)
def test_texts_before_inputs_are_read_by_type(
    file: dict[str, Any] | None, config: dict[str, Any], found: Any, tmp_path: Path
) -> None:
    if file is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(file))
    pooling = read(tmp_path, CASES["qwen3-gqa"] | config, Wish(runner="pooling")).pooling
    assert pooling is not None and pooling.prompts == found
