"""Where options come from: the command line, else the environment, else a file, else defaults."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from jaxllm.config import ConfigError
from jaxllm.server.command_line.server_flags import SERVER_WIDE

PREFIX = "JAXLLM_"
# What scripts for vLLM set; the variable of jaxllm goes before it
VLLM_VARIABLES = {
    "VLLM_API_KEY": "api_key",
    "VLLM_LOGGING_LEVEL": "log_level",
    "VLLM_LOG_STATS_INTERVAL": "log_stats_interval",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
}
# What Kubernetes' LeaderWorkerSet sets in the pods of a group
LWS_VARIABLES = {
    "LWS_GROUP_SIZE": "nnodes",
    "LWS_WORKER_INDEX": "node_rank",
    "LWS_LEADER_ADDRESS": "master_addr",
}
OTHER_VARIABLES = VLLM_VARIABLES | LWS_VARIABLES
# Kubernetes sets these for a service that is named jaxllm
OF_A_SERVICE = re.compile(r"JAXLLM_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)")
SECRETS = frozenset({"api_key", "admin_key", "hf_token", "ssl_keyfile_password"})
MAX_SHOWN = 120  # characters of a value in the log
MAX_FILE = 1 << 20
LINE = "command line"
MEMORY = "gpu_memory_utilization"
DEVICES = "visible_devices"
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False, "no": False, "off": False, "0": False
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What was given, merged.

    Attributes:
        args: every option, by its name as a field.
        sources: where each option that was given comes from, by that name.
        notices: what an operator should know about it, a line each.
    """

    args: argparse.Namespace
    sources: dict[str, str]
    notices: list[str]

    def shown(self) -> str:
        """What was given and where, on one line; secrets are hidden."""
        return ", ".join(
            f"{name.replace('_', '-')}={_shown(name, getattr(self.args, name))} ({source})"
            for name, source in self.sources.items()
        )


def _shown(name: str, value: Any) -> str:
    if name in SECRETS:
        return "***"
    plain = isinstance(value, str) and value.isprintable()
    if plain:
        text = value
    else:
        text = json.dumps(value, default=str)
    if len(text) <= MAX_SHOWN:
        return text
    return text[: MAX_SHOWN - 1] + "…"


def read_options(
    top: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str]
) -> list[Given]:
    """The options of all sources, for each model: one for each --model, or for each entry of
    `models` in the file, whose options go before the file's others. Exits on a wrong command line;
    raises ConfigError for the other sources.

    `top` is changed: it gives what it reads, and no defaults.
    """
    actions = _actions(top)
    defaults = {action.dest: action.default for action in actions.values()}
    for action in top._actions:
        action.default = argparse.SUPPRESS
    names, argv = _model_names(argv)
    line: Layer = {name: (value, LINE) for name, value in vars(_parse(top, argv)).items()}
    variables, notices = _read_environment(actions, environ)
    path, _ = line.get("config", variables.get("config", (None, "")))
    common, entries = ({}, []) if path is None else _read_file(actions, Path(path))
    named: list[Layer] = [{"model": (name, LINE)} for name in names]
    if entries and (named or "model" in line | variables):
        raise ConfigError(f"--config {path} has models; leave --model out, or name one file of one")
    models = entries or named or [{}]
    merged: list[Layer] = [{**common, **model, **variables, **line} for model in models]
    choices = []
    for model, layer in zip(models, merged, strict=True):
        settings = _share(layer, merged, defaults) | layer | (model if named else {})
        values = {name: value for name, (value, _) in settings.items()}
        sources = {name: source for name, (_, source) in settings.items()}
        choices.append(Given(argparse.Namespace(**defaults | values), sources, notices))
    return choices


def _model_names(argv: list[str]) -> tuple[list[str], list[str]]:
    """The models of a command line that names several, and its other words; of any other line no
    names, and all of it."""
    names = []
    rest = []
    words = iter(argv)
    for word in words:
        if word == "--model":
            names.append(next(words, ""))
        elif word.startswith("--model="):
            names.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(names) > 1:
        return (names, rest)
    return ([], argv)


def _share(layer: Layer, models: list[Layer], defaults: dict[str, Any]) -> Layer:
    """Models on the same devices share them in equal parts, where nothing else is said."""
    count = sum(model.get(DEVICES, ("",))[0] == layer.get(DEVICES, ("",))[0] for model in models)
    if count == 1:
        return {}
    share = math.floor(1000 * defaults[MEMORY] / count) / 1000
    return {MEMORY: (share, f"shared by {count} models")}


type Layer = dict[str, tuple[Any, str]]  # option -> value and source


def _actions(top: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every flag by its long names."""
    return {
        flag: action
        for action in top._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }


def _parse(top: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The command line; a model may stand after options, too."""
    args, unknown = top.parse_known_args(argv)
    if len(unknown) == 1 and not hasattr(args, "model") and _may_be_model(unknown[0]):
        args.model = unknown.pop()
    if unknown:
        flags = [flag for action in top._actions for flag in action.option_strings]
        top.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0], flags)}")
    return args


def _may_be_model(word: str) -> bool:
    """Whether a word that belongs to no option is a model, and not the value of a switch."""
    return not word.startswith("-") and word.lower() not in BOOLEANS


def _meant(word: str, known: list[str]) -> str:
    """The end of a message about an unknown word: the known one that looks like it."""
    matches = difflib.get_close_matches(word.partition("=")[0], known, 1, 0.75)
    if matches:
        return f" (did you mean {matches[0]}?)"
    return ""


def _read_environment(
    actions: dict[str, argparse.Action], environ: Mapping[str, str]
) -> tuple[Layer, list[str]]:
    """The options in JAXLLM_… and OTHER_VARIABLES. Empty variables say nothing."""
    names = {PREFIX + flag[2:].replace("-", "_").upper(): flag for flag in actions}
    by_field = {action.dest: flag for flag, action in actions.items()}
    known = {name: by_field[field] for name, field in OTHER_VARIABLES.items()} | names
    layer: Layer = {}
    for name, flag in known.items():
        text = environ.get(name, "")
        if text and not (OF_A_SERVICE.fullmatch(name) and "://" in text):
            if actions[flag].nargs in ("+", "*"):
                value = _listed(text)
            else:
                value = text
            layer[actions[flag].dest] = (_read(actions[flag], flag, value, name), name)
    others = (name for name in environ if name.startswith(PREFIX) and name not in names)
    notices = [
        f"the variable {name} is no option and has no effect{_meant(name, list(names))}"
        for name in sorted(others)
        if not OF_A_SERVICE.fullmatch(name)
    ]
    return layer, notices


def _listed(text: str) -> list[Any] | str:
    """A JSON list in a variable, else the text as the one value."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return text
    if isinstance(value, list):
        return value
    return text


def _read_file(actions: dict[str, argparse.Action], path: Path) -> tuple[Layer, list[Layer]]:
    """The options of a file, and those of each of its `models`."""
    options = load_yaml(path)
    models = options.pop("models", None)
    if models is not None and not (
        isinstance(models, list) and models and all(isinstance(entry, dict) for entry in models)
    ):
        raise ConfigError(
            f"--config {path}: models must be a list, each with options as `name: value`"
        )
    entries = [
        _read_mapping(actions, entry, f"--config {path}: models[{number}]", path.name)
        for number, entry in enumerate(models or [])
    ]
    for number, entry in enumerate(entries):
        if "model" not in entry:
            raise ConfigError(f"--config {path}: models[{number}] has no model")
        for option in entry.keys() & SERVER_WIDE:
            raise ConfigError(
                f"--config {path}: models[{number}]: {option} is an option of the whole server; "
                "put it beside models"
            )
    common = _read_mapping(actions, options, f"--config {path}", path.name)
    if entries and "model" in common:
        raise ConfigError(f"--config {path} has both model and models; give one of them")
    return common, entries


def _read_mapping(
    actions: dict[str, argparse.Action], options: dict[Any, Any], where: str, source: str
) -> Layer:
    layer: Layer = {}
    for key, value in options.items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag == "--config":
            raise ConfigError(f"{where}: a file names no other file; put its options here")
        if flag not in actions:
            meant = _meant(flag, [name for name in actions if name != "--config"])
            meant = meant.replace("--", "")
            raise ConfigError(f"{where}: {key!r:.80} is no option{meant}")
        if value is not None:
            option = actions[flag].dest
            if option in layer:
                raise ConfigError(f"{where}: {key!r:.80} is there twice, under two names")
            layer[option] = (_read(actions[flag], flag, value, f"{where}: {key}"), source)
    return layer


class _Loader(yaml.SafeLoader):
    """Plain data; a key that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """yaml's hook."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.MarkedYAMLError(
                    problem=f"{key!r:.80} is there twice",
                    problem_mark=node.value[number][0].start_mark,
                )
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[Any, Any]:
    """A YAML file that holds one mapping. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: no path at all
        trouble = getattr(error, "strerror", error)
        raise ConfigError(f"--config {path} cannot be read: {trouble}") from None
    if len(text) > MAX_FILE:
        raise ConfigError(f"--config {path} is larger than {MAX_FILE} bytes")
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = ""
        if mark is not None:
            line = f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it is no text, or nested too deeply"
        raise ConfigError(f"--config {path} is no YAML{line}: {problem}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path} must hold options as `name: value`, a line each")
    return value


def _read(action: argparse.Action, flag: str, value: Any, where: str) -> Any:
    """A value of another source, as the command line would read it. Raises ConfigError."""
    if action.nargs == 0:
        switch = BOOLEANS.get(str(value).lower())
        if switch is None:
            raise ConfigError(f"{where} must be true or false, got {value!r:.80}")
        inverted = flag.startswith("--no-") and isinstance(action, argparse.BooleanOptionalAction)
        return switch is not inverted
    if action.nargs in ("+", "*"):
        return [
            _one(action, element, where)
            for element in (value if isinstance(value, list) else [value])
        ]
    return _one(action, value, where)


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    try:
        text = (value.encode() if isinstance(value, str) else orjson.dumps(value)).decode()
        parsed = text if action.type is None else action.type(text)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        hidden = action.dest in SECRETS
        raise ConfigError(f"{where}: {'not a text' if hidden else str(error)[:300]}") from None
    if action.choices is not None and parsed not in action.choices:
        raise ConfigError(f"{where} must be one of {', '.join(map(str, action.choices))}")
    return parsed
