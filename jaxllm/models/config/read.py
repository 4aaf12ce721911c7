"""Reads `config.json` and checks its values. Imports no jax."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.locate import read_json
from jaxllm.models.config.quantisation import weight_scheme
from jaxllm.sampling.defaults import generation_config

type Config = Mapping[str, Any]  # of a config.json

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 2**12
MAX_NUMBER = 1e18  # what float32 and int64 hold
STORED_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Files that say how weights are packed where `config.json` does not, with the methods that write
# them: of modelopt, of AutoAWQ, and of AutoGPTQ
QUANTISATION = {
    "hf_quant_config.json": "modelopt",
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
}
# Sizes that every family has; each may be left out where the family has a default
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def families() -> list[str]:
    """The model types that can be served: the files of `jaxllm/models`."""
    return list(_families())


@functools.cache
def _families() -> tuple[str, ...]:
    """Listed once: a model's layers ask for their family each."""
    folder = [str(Path(__file__).parents[1])]
    return tuple(sorted(name for _, name, package in pkgutil.iter_modules(folder) if not package))


def family(model_type: str) -> ModuleType:
    """The module of one family: `DEFAULTS`, `NAMES`, `spec`, `build`, and where it needs them
    `SPELLING`, `read`, `OTHER_NAMES`, `PREFIXES`, `IGNORED`, `REMOTE_CODE`, `GENERATES`,
    `TOKEN_HEAD`; of an encoder also `ENCODES` and `classifier`. The file's name has "_" for "-".

    Raises ConfigError for an unknown model type.
    """
    model_type = str(model_type).replace("-", "_")
    if model_type not in _families():
        raise ConfigError(unknown(model_type))
    return importlib.import_module(f"jaxllm.models.{model_type}")


def summary(model_type: str) -> str:
    """What a family is, in a paragraph: its file's docstring, which is read without running it."""
    return " ".join((ast.get_docstring(_parsed(model_type)) or "").split())


def state(model_type: str) -> str:
    """What models of a family do here. The family's file is read without running it."""
    names = {node.id for node in ast.walk(_parsed(model_type)) if isinstance(node, ast.Name)}
    if "ENCODES" in names:
        return "pools"
    return "generates or pools"


def _parsed(model_type: str) -> ast.Module:
    return ast.parse((Path(__file__).parents[1] / f"{model_type}.py").read_text())


def unknown(model_type: object) -> str:
    """Why a model type is refused, with the families that run and the nearest of them."""
    written = ""
    if isinstance(model_type, str):
        written = model_type.lower()
    near = get_close_matches(written, families(), 1, 0.4)
    nearest = ""
    if near:
        nearest = f"; the nearest is {near[0]}"
    return (
        f"model_type {model_type!r:.80} is not supported "
        f"(supported: {', '.join(families())}){nearest}"
    )


def with_dtype(config: Config, dtype: str) -> dict[str, Any]:
    """The `config.json` of the same model with weights of another type. Raises ConfigError for a
    quantised one."""
    if config.get("quantization_config") is not None:
        raise ConfigError(
            "a quantised checkpoint has types of its own; leave out --dtype to keep them"
        )
    inner = {
        key: with_dtype(value, dtype)
        for key, value in config.items()
        if isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value)
    }
    name = "dtype"
    if "torch_dtype" in config:
        name = "torch_dtype"
    return {**config, **inner, name: dtype}


def read_config(
    model_dir: str | Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json` of a model that can be served, with other values for keys of `overrides`.

    One of QUANTISATION takes the place of a missing `quantization_config`; the end-of-sequence ids
    of `generation_config.json` join those of `config.json`. Raises one ConfigError that names every
    problem.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} does not exist; "
            "give a directory with config.json and *.safetensors"
        )
    hf = check_sizes(directory, overrides)
    source = add_quantisation(directory, hf)
    problems = []
    model_type = hf.get("model_type")
    if _foreign_code(hf):
        problems.append(
            "it asks for remote code (auto_map), which is never run; "
            "use a checkpoint whose architecture is built in"
        )
    try:
        weight_scheme(hf, source)
    except ConfigError as error:
        problems.append(str(error))
    if str(model_type).replace("-", "_") not in families():
        problems.append(unknown(model_type))
    if problems:
        raise ConfigError(f"{directory / 'config.json'}: {'; '.join(problems)}")
    generation = generation_config(directory)
    if generation.get("eos_token_id") is not None:
        hf["eos_token_id"] = sorted(eos_token_ids(hf) | eos_token_ids(generation))
    return hf


def add_quantisation(directory: Path, hf: dict[str, Any]) -> str:
    """Adds the settings of one of QUANTISATION where `config.json` has none; returns where they
    stand. Raises ConfigError for a file that is no JSON object."""
    key = "quantization_config"
    names = (name for name in QUANTISATION if os.path.lexists(directory / name))
    if hf.get(key) or (name := next(names, None)) is None:
        return key
    settings = read_json(directory / name)
    if "quantization" not in settings and settings.get("quant_method") is None:
        settings = {**settings, "quant_method": QUANTISATION[name]}
    hf[key] = settings
    return name


def _foreign_code(hf: Config) -> bool:
    """Whether a model class of `auto_map` lies in a module that no family file stands for."""
    named = hf.get("auto_map")
    model_type = str(hf.get("model_type")).replace("-", "_")
    if not isinstance(named, dict) or model_type not in families():
        return bool(named)
    modules = getattr(family(model_type), "REMOTE_CODE", ())
    return any(
        key.startswith("AutoModel")
        and str(value).rpartition("--")[2].partition(".")[0] not in modules
        for key, value in named.items()
    )


def common_keys(hf: Config, spelling: Mapping[str, str]) -> dict[str, Any]:
    """The configuration with a family's own keys under their common names; `spelling` maps the
    former to the latter. The family's own keys win, as in transformers.

    Raises ConfigError for two numbers of experts.
    """
    for key in (key for key in spelling if key.endswith("_experts")):
        pair = hf.get(spelling[key]), hf.get(key)
        if None not in pair and pair[0] != pair[1]:
            raise ConfigError(
                f"config.json: {spelling[key]} is {pair[0]!r:.40}, but {key} is {pair[1]!r:.40}; "
                "both are the number of experts: keep that of the checkpoint"
            )
    renamed = {spelling[key]: value for key, value in hf.items() if key in spelling}
    return {**{key: value for key, value in hf.items() if key not in spelling}, **renamed}


@contextmanager
def named_as_in_file(hf: Config, spelling: Mapping[str, str]) -> Iterator[None]:
    """ConfigErrors raised inside name keys as the file does, not by their common names."""
    file_names = {key: name for name, key in spelling.items() if name in hf or key not in hf}
    try:
        yield
    except ConfigError as error:
        said = re.sub(r"\w+", lambda word: file_names.get(word[0], word[0]), str(error))
        raise ConfigError(said) from error


def text_part(hf: Config) -> dict[str, Any]:
    """The language model's configuration inside that of a model that also sees or hears.

    What stands outside alone is kept, and so is `tie_word_embeddings`, which transformers reads
    there. Ends of sequences of both are joined: outside are those of chats. Of the objects outside,
    `quantization_config` is that of the whole checkpoint. Raises ConfigError for wrong ends.
    """
    inner = hf.get("text_config")
    if not isinstance(inner, dict):
        return dict(hf)
    shared = ("quantization_config",)
    outer = {k: value for k, value in hf.items() if k in shared or not isinstance(value, dict)}
    kept = {key: value for key, value in inner.items() if value is not None and key != "model_type"}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if outer.get(key) is not None}
    ends = sorted(eos_token_ids(outer) | eos_token_ids(kept))
    config = {**outer, **kept, **tied}
    if ends:
        config["eos_token_id"] = ends
    return config


def check_sizes(
    model_dir: str | Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json`, whatever the model's family, with other values for keys of `overrides`.

    Raises ConfigError when it is no JSON object, or when a size in it is absurd. Call this before
    any other library reads the file: transformers allocates what it says.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model_dir} has no config.json; give a Hugging Face model directory")
    hf = read_json(path) | dict(overrides or {})
    inner = hf.get("text_config")
    for part in (hf, inner if isinstance(inner, dict) else {}):
        for key in SIZES:
            if part.get(key) is not None:
                positive(part, key)
    return hf


def eos_token_ids(hf: Config) -> set[int]:
    """The end-of-sequence ids of one file, where they are an integer, a list of them, or null.

    Raises ConfigError for anything else. Whether the ids lie in the vocabulary is checked later.
    """
    value = hf.get("eos_token_id")
    if isinstance(value, list):
        ids = value
    elif value is None:
        ids = []
    else:
        ids = [value]
    if any(type(i) is not int for i in ids):
        raise ConfigError(
            f"eos_token_id is {value!r:.80}; it must be an integer, a list of integers or null"
        )
    return set(ids)


def stored_dtype(hf: Config) -> str | None:
    """The dtype that the checkpoint claims to hold, None where it does not say.

    Raises ConfigError for anything but one of STORED_DTYPES.
    """
    value = next((hf[key] for key in ("dtype", "torch_dtype") if hf.get(key) is not None), None)
    name = None
    if value is not None:
        name = str(value).removeprefix("torch.")
    if name not in (None, *STORED_DTYPES):
        raise ConfigError(
            f"config.json: dtype {value!r:.80} is not supported "
            f"(supported: {', '.join(STORED_DTYPES)})"
        )
    return name


def positive(hf: Config, key: str) -> int:
    """A size from the configuration.

    Raises ConfigError when it is missing, not a positive integer, or too large to be meant.
    """
    value = hf.get(key)
    if key == "num_hidden_layers":
        limit = MAX_LAYERS
    else:
        limit = MAX_SIZE
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r:.80}; it must be a positive integer")
    if value > limit:
        raise ConfigError(f"config.json: {key} is {value!r:.80}; at most {limit} is supported")
    return value


def flag(hf: Config, key: str) -> bool:
    """A switch from the configuration, off where it is missing or null.

    Raises ConfigError when it is neither true nor false.
    """
    value = hf.get(key)
    if value is not None and type(value) is not bool:
        raise ConfigError(f"config.json: {key} is {value!r:.80}; it must be true or false")
    return bool(value)


def is_causal(hf: Config) -> bool:
    """Whether tokens see those before them alone, as decoders do that do not say otherwise."""
    return flag({"is_causal": True, **hf}, "is_causal")


def number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number, `default` where it is missing or null.

    Raises ConfigError when it is anything else.
    """
    value: Any = settings.get(key)
    if value is None:
        value = default
    if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
        raise ConfigError(f"config.json: {key} is {value!r:.80}; it must be a positive number")
    return float(value)


def settings_of(hf: Config, key: str) -> dict[str, Any]:
    """The object under a key, {} where it is missing or null. Raises ConfigError for another
    value."""
    value = hf.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"config.json: {key} is {value!r:.80}; an object is expected")
    return dict(value or {})


def optional(settings: Mapping[str, Any], key: str) -> float | None:
    """A positive number, None where it is missing or null. Raises ConfigError as `number`."""
    if settings.get(key) is None:
        return None
    return number(settings, key)


def whole(hf: Config, key: str) -> int:
    """A count from the configuration that may be zero. Raises ConfigError when it is no integer of
    at least 0."""
    value = hf.get(key)
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise ConfigError(
            f"config.json: {key} is {value!r:.80}; it must be an integer of at least 0"
        )
    return value


def with_inner(hf: Config) -> dict[str, Any]:
    """The configuration, in which a missing `intermediate_size` is four times the width. Raises
    ConfigError."""
    if hf.get("intermediate_size") is not None:
        return dict(hf)
    return {**hf, "intermediate_size": 4 * positive(hf, "hidden_size")}
