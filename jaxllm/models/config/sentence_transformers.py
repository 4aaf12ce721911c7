"""What the files of sentence-transformers say: which modules follow a transformer, and what each
does. Imports no jax.

https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.locate import check_regular, read_json
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.pooling import MODES, DenseMap

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"  # may hold prompts, and activation_fn
LIMIT = "sentence_bert_config.json"  # holds max_seq_length
MAX_DENSE = 8
POOLED = "sentence_embedding"  # what the pool gives
ORDER = rf"Transformer( Pooling( Dense){{0,{MAX_DENSE}}})?( Normalize)?"

# Switches of older 1_Pooling/config.json, in the order in which their results stand side by side
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Names of modes in newer ones
_NAMES = {
    "lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
} | {mode: mode for mode in MODES}
# Activations of Dense modules
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


def length_limit(model_dir: Path) -> int | None:
    """Tokens that sentence-transformers cuts inputs to. Raises ConfigError."""
    path = model_dir / LIMIT
    if not os.path.lexists(path):
        return None
    settings = read_json(path)
    if settings.get("max_seq_length") is None:
        return None
    return positive(settings, "max_seq_length")


def prompts_of(model_dir: Path, hf: Config) -> tuple[tuple[str, str], ...]:
    """Types of inputs with the texts before them: `task_instructions` of config.json, else the
    `prompts` of sentence-transformers. What is no text is left out, as in vLLM. Raises
    ConfigError."""
    path = model_dir / SETTINGS
    prompts = hf.get("task_instructions")
    if not prompts and os.path.lexists(path):
        prompts = read_json(path).get("prompts")
    named = prompts.items() if isinstance(prompts, Mapping) else ()
    return tuple((str(name), text) for name, text in named if isinstance(text, str))


def modules_of(model_dir: Path) -> list[tuple[str, str]]:
    """(type, folder) of each module of sentence-transformers; empty without them."""
    path = model_dir / MODULES
    if not os.path.lexists(path):
        return []
    check_regular(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        modules = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is not a list of modules with type and path") from None
    for _, folder in modules:
        if Path(folder).name != folder:
            raise ConfigError(f"{path} names the folder {folder!r:.80}; it must lie beside it")
    order = " ".join(name for name, _ in modules)
    if not re.fullmatch(ORDER, order):
        raise ConfigError(
            f"{path} lists the modules {order!r:.200}; supported are Transformer, Pooling, "
            f"at most {MAX_DENSE} of Dense, and Normalize, in this order"
        )
    return modules


def modes_of(folder: Path) -> tuple[str, ...]:
    """The pooling modes of one `Pooling` module, in the order of their results."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, which {MODULES} asks for")
    config = read_json(path)
    setting = config.get("pooling_mode")
    if setting is None:
        modes = tuple(mode for switch, mode in _SWITCHES.items() if flag(config, switch))
    else:
        if isinstance(setting, list):
            names = setting
        else:
            names = [setting]
        modes = tuple(_NAMES.get(str(name), "") for name in names)
    if not modes or "" in modes:
        raise ConfigError(f"{path}: the pooling mode must be one of {', '.join(MODES)}")
    if config.get("include_prompt") is False:
        raise ConfigError(
            f"{path}: include_prompt false leaves an instruction out of the pool, which is not "
            "supported; set it to true where inputs have no instruction"
        )
    return modes


def dense_map(model_dir: Path, folder: str, size: int) -> DenseMap:
    """One `Dense` module, which takes vectors of `size` elements."""
    path = model_dir / folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, which {MODULES} asks for")
    config = read_json(path)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        legal = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{path}: activation_function {name!r:.80} is not one of {legal}")
    if flag(config, "use_residual") or config.get("module_input_name", POOLED) != POOLED:
        raise ConfigError(
            f"{path}: use_residual must be false and module_input_name {POOLED!r}; others are not "
            "supported"
        )
    if positive(config, "in_features") != size:
        raise ConfigError(f"{path}: in_features is {config['in_features']}, but it gets {size}")
    return DenseMap(
        name=f"{folder}/linear",
        inputs=size,
        outputs=positive(config, "out_features"),
        bias=flag({"bias": True} | config, "bias"),
        activation=_ACTIVATIONS[name],
    )
