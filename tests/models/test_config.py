"""What is known from config.json, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline
from jaxllm.models.config.read import SIZES, text_part
from tests.goldens.cases import CASES
from tests.goldens.pooled_cases import CASES as POOLED

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 100,
}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def directory(path: Path, config: object, generation: object = None) -> Path:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


# Of a family's file, which has one statement a line: what it says beyond Llama fits a screen and a
# half
MOST_LINES = 90
MOST_UNLIKE = 165
# Encoders, blocks of another order, routers and experts of their own
UNLIKE_LLAMA = (
    *("bert", "bloom", "cohere2_moe", "dbrx", "ernie4_5_moe", "falcon", "gemma2", "gpt_oss", "gte"),
    *("modernbert", "mpt", "nomic_bert", "phi", "phimoe", "stablelm"),
)


def test_the_families_are_the_files_of_the_folder() -> None:
    files = {path.stem for path in Path(models.__path__[0]).glob("[a-z]*.py")}
    assert models.families() == sorted(files)
    assert {"llama", "mistral", "qwen2", "qwen3"} < files
    folder = Path(models.__file__).parent
    for name in models.families():
        lines = len((folder / f"{name}.py").read_text().splitlines())
        assert lines <= (MOST_UNLIKE if name in UNLIKE_LLAMA else MOST_LINES), name


def test_reading_a_config_imports_no_jax() -> None:
    code = (
        "import sys, jaxllm.models as m; m.families(); "
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list; an object is expected"),
        ({}, "model_type None is not supported \\(supported: .*llama, .*qwen3.*\\)"),
        ({"model_type": "rwkv"}, "model_type 'rwkv' is not supported"),
        ({"model_type": ["llama"]}, "model_type \\['llama'\\] is not supported"),
        ({"model_type": "_rules"}, "model_type '_rules' is not supported"),
        (
            TINY | {"auto_map": {"AutoModel": "modeling.Mine"}},
            "remote code \\(auto_map\\), which is never run",
        ),
        (
            TINY | {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config \\(gptq\\) is not supported",
        ),
        ({"model_type": "x", "auto_map": {"A": "b"}}, "auto_map.*; model_type 'x'"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_line_that_says_why(
    tmp_path: Path, config: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        models.read_config(directory(tmp_path, config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("qwen33", "qwen3"),
        ("gemma3_txt", "gemma3_text"),
        ("LLAMA", "llama"),
        ("opt2", "opt"),
        ("??", None),
    ],
)
def test_an_unknown_model_type_names_the_nearest(given: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        models.family(given)
    assert str(error.value).endswith(")" if nearest is None else f"; the nearest is {nearest}")


def test_remote_code_that_a_file_stands_for_is_not_needed(tmp_path: Path) -> None:
    named = {"AutoConfig": "x.Y", "AutoModelForCausalLM": "org/name--modeling_phi3.Phi3ForCausalLM"}
    phi = TINY | {"model_type": "phi3", "auto_map": named}
    assert models.read_config(directory(tmp_path, phi)) == phi
    named["AutoModel"] = "modeling_mine.Mine"
    with pytest.raises(ConfigError, match=r"remote code \(auto_map\)"):
        models.read_config(directory(tmp_path, phi))


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("minimax_m2", "modeling_minimax_m2"),
        ("hunyuan_v1_moe", "hunyuan"),
        ("ernie4_5", "modeling_ernie4_5"),
        ("ernie4_5_moe", "modeling_ernie4_5_moe"),
        ("dots1", "modeling_dots1"),
        ("solar_open", "modeling_solar_open"),
        ("stablelm", "modeling_stablelm"),
        ("gte", "modeling_hf_alibaba_nlp_gte"),
    ],
)
def test_code_of_the_first_checkpoints_is_that_of_the_family(
    tmp_path: Path, family: str, module: str
) -> None:
    named = {"AutoConfig": "configuration.X", "AutoModel": f"{module}.X"}
    config = TINY | {"model_type": family, "auto_map": named}
    assert models.read_config(directory(tmp_path, config)) == config


def test_the_text_part_of_a_model_that_sees_is_read() -> None:
    given = {
        "model_type": "outer",
        "text_config": {"model_type": "inner", "hidden_size": 3, "eos_token_id": None},
        "vision_config": {"hidden_size": 5},
        "eos_token_id": [7],
        "hidden_size": 4,
    }
    read = text_part(given)
    assert read == {"model_type": "outer", "hidden_size": 3, "eos_token_id": [7]}
    assert text_part(read) == read


BROKEN = (-1, "x", [1], {"full_attention": 3})


@pytest.mark.parametrize("family", models.families())
def test_a_wrong_value_of_any_key_is_one_clear_error_or_none(family: str) -> None:
    configs = [*CASES.values(), *(files["config.json"] for files in POOLED.values())]
    configs.append(POOLED["gte-labels"]["config.json"] | {"model_type": "new"})
    hf = next(hf for hf in configs if hf["model_type"].replace("-", "_") == family)
    keys = {*hf, *models.family(family).DEFAULTS, "rope_scaling", "rope_parameters"}
    for key, value in itertools.product(sorted(keys - {"model_type"}), BROKEN):
        with contextlib.suppress(ConfigError):
            models.make_spec(hf | {key: value})


def test_a_missing_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        models.read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        models.read_config(tmp_path)


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"llama, .*mistral, .*qwen3"):
        models.family("os")


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    path = directory(tmp_path, TINY, {"eos_token_id": [7, 8]})
    assert models.read_spec(path).eos_token_ids == (7, 8)
    directory(tmp_path, TINY | {"eos_token_id": 5})
    assert models.read_spec(path).eos_token_ids == (5, 7, 8)
    directory(tmp_path, TINY | {"eos_token_id": None})
    assert models.read_spec(path).eos_token_ids == (7, 8)


def test_a_model_without_generation_config_has_no_ends_of_its_own(tmp_path: Path) -> None:
    assert models.read_spec(directory(tmp_path, TINY)).eos_token_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id is 'x'"):
        models.make_spec(TINY | {"eos_token_id": "x"})


def test_a_negative_end_of_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id -1 is not in the vocabulary of 96"):
        models.make_spec(TINY | {"eos_token_id": [5, -1]})
    with pytest.raises(ConfigError, match=r"correct config\.json or generation_config\.json"):
        models.read_spec(directory(tmp_path, TINY, {"eos_token_id": -1}))


@pytest.mark.parametrize("token", [96, 10**30])
def test_an_end_of_sequence_that_no_token_has_ends_nothing_and_is_told(
    tmp_path: Path, token: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert models.make_spec(TINY | {"eos_token_id": [5, token]}).eos_token_ids == (5,)
    read = models.read_spec(directory(tmp_path, TINY, {"eos_token_id": token}))
    assert token not in read.eos_token_ids
    assert f"eos_token_id {token} of config.json or generation_config.json" in caplog.text


@pytest.mark.parametrize("name", ["generation_config.json", "hf_quant_config.json"])
def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    directory(tmp_path, TINY)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} is not a regular file; replace or remove it"):
        models.read_spec(tmp_path)


@pytest.mark.parametrize("size", [2**31, 10**12, -1, 0, True, "32", 1.5, [3]])
@pytest.mark.parametrize("key", SIZES)
def test_absurd_sizes_are_refused_before_any_other_library_reads_them(
    tmp_path: Path, key: str, size: object
) -> None:
    path = directory(tmp_path, TINY | {"model_type": "any", key: size})
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is .*(at most|positive integer)"):
        models.check_sizes(path)


def test_a_billion_layers_are_refused_at_once(tmp_path: Path) -> None:
    path = directory(tmp_path, TINY | {"num_hidden_layers": 10**9})
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000; at most 4096"):
        models.read_spec(path)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", ["false", 0, 1, []])
def test_a_switch_is_true_or_false_and_nothing_like_it(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*; it must be true or false"):
        outline(models.make_spec(TINY | {key: value}), 1, "float32")
    absent, null = (models.make_spec(TINY | more) for more in ({}, {key: None}))
    assert replace(null, config={}) == replace(absent, config={})


def test_a_head_width_that_no_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head_dim is 2147483646; .* at most 16384"):
        models.make_spec(TINY | {"head_dim": 2**31 - 2})


@pytest.mark.parametrize(("shards", "kv_heads"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_kv_heads_are_repeated_to_the_shards(shards: int, kv_heads: int) -> None:
    heads = models.make_spec(TINY).heads(shards)
    assert (heads.kv_stored, heads.kv, heads.dim) == (kv_heads, 2, 4)


@pytest.mark.parametrize(
    ("changes", "shards", "message"),
    [
        (
            {},
            3,
            "8 attention heads do not divide over 3 tensor shards; "
            "choose a tensor_parallel_size that divides",
        ),
        (
            {"num_key_value_heads": 3},
            1,
            "8 attention heads are not a multiple of 3 key-value heads; "
            "config.json is inconsistent",
        ),
        ({"num_attention_heads": 0}, 1, "num_attention_heads is 0; it must be a positive integer"),
        ({"num_hidden_layers": "2"}, 1, "num_hidden_layers is '2'"),
        ({"head_dim": 7}, 1, "head_dim is 7; rotary embedding needs a positive even number"),
        ({"hidden_size": 4}, 1, "head_dim is 0; rotary embedding"),
    ],
)
def test_heads_that_cannot_work_are_refused(
    changes: dict[str, Any], shards: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        models.make_spec(TINY | changes).heads(shards)


def test_families_know_what_a_config_may_leave_out() -> None:
    sparse = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    assert models.make_spec(sparse).heads(1).kv == 8
    assert models.make_spec(sparse | {"model_type": "mistral"}).heads(1).kv == 8
    assert models.make_spec(TINY | {"model_type": "qwen3"}).heads(1).dim == 128


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 100),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 250),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 200),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 50,
                }
            },
            200,
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 400),
        (
            {
                "original_max_position_embeddings": 50,  # outside, it wins
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 100,
                },
            },
            200,
        ),
        ({"rope_parameters": LLAMA3}, 100),
    ],
)
def test_rope_scaling_stretches_the_context(changes: dict[str, Any], length: int) -> None:
    assert models.make_spec(TINY | changes).context_length == length
