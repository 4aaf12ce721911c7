"""The command line's flags, by groups: every field of EngineConfig under its own name, and the
server's own."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import orjson

from jaxllm.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    NEUTRAL_ARGUMENTS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    ConfigError,
    EngineConfig,
    human_int,
    number,
    token_count,
)
from jaxllm.pooling import CONVERTS, RUNNERS

KEY_VARIABLES = ("JAXLLM_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "JAXLLM_ADMIN_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")

# Flags of EngineConfig's fields by group: field -> help. The dataclass has types and defaults.
ENGINE_FLAGS: dict[str, dict[str, str]] = {
    "Model": {
        "model": "a local Hugging Face directory, a hub id (owner/name), or demo, the built-in "
        "model",
        "tokenizer": "directory or hub id of the tokenizer, if not the model's own",
        "skip_tokenizer_init": "run without a tokenizer: token ids in, token ids out",
        "runner": "generate or pooling; auto: what the checkpoint is made for",
        "convert": "what a pooling model gives: embed, classify; auto: what the checkpoint says",
        "pooler_config": "JSON object: task (embed, classify, token_embed, token_classify) or "
        "pooling_type (CLS, LAST, MEAN, ALL) in place of the checkpoint's",
        "hf_overrides": "JSON object: other values for keys of config.json",
        "revision": "branch, tag or commit of a hub model",
        "download_dir": "directory for downloaded hub models",
        "load_format": "auto and safetensors read the checkpoint; dummy makes random weights",
        "dtype": "type of weights and activations; auto: float32 on CPU, else the checkpoint's, "
        "with bfloat16 in place of float32",
        "max_model_len": "longest sequence in tokens: a number, 32k, or auto for the longest "
        "that fits",
        "seed": "seed of requests without one, and of dummy weights",
        "max_logprobs": "log-probabilities per token that a request may ask for",
        "logprobs_mode": "log-probabilities or logits, of the model (raw) or after all sampling "
        "options (processed)",
        "enforce_eager": "compile programs on first use instead of at start",
        "compilation_cache_dir": "directory that keeps compiled programs between starts",
        "attention_backend": "implementation of attention; by default the device's fastest that "
        "supports the model",
    },
    "Memory": {
        "gpu_memory_utilization": "fraction of device memory for weights, workspace and KV pages",
        "kv_cache_memory_bytes": "size of the KV pool in bytes, instead of the fraction",
        "num_gpu_blocks_override": "number of KV pages, instead of the fraction; in models with "
        "sliding windows, of the layers without one",
        "block_size": "tokens per KV page",
        "kv_cache_dtype": "type of KV pages; fp8 (= fp8_e4m3) and fp8_e5m2 take half the memory; "
        "auto follows the checkpoint",
        "kv_offloading_size": "GiB of host memory for cached prefixes that do not fit the KV pool",
        "enable_prefix_caching": "share the KV pages of equal beginnings of prompts",
    },
    "Scheduler": {
        "max_num_seqs": "sequences that run at once, at most",
        "max_num_batched_tokens": "tokens in one step, at most",
        "max_num_queued_reqs": "requests that wait, at most; further ones get 503",
        "max_stall_ms": "time that running streams may wait for a chunk of a prompt, in "
        "milliseconds",
        "scheduling_policy": "fcfs: first come, first served; priority: a request's priority is "
        "a bounded head start",
        "preemption_mode": "recompute preempted sequences, or swap their pages to host memory "
        "and back",
        "swap_space": "GiB of host memory per device for --preemption-mode swap (default: 4)",
        "scheduler_cls": "module:Class of a scheduler, a subclass of "
        "jaxllm.engine.scheduler:Scheduler",
        "batch_invariant": "the same tokens for a request in any batch, also on accelerators "
        "(slower; docs/sampling.md)",
        "async_scheduling": "plan the next step while the device runs the current one",
    },
    "Profiling": {
        "profiler_dir": "directory of JAX's traces; opens POST /start_profile and /stop_profile",
    },
    "Parallel": {"tensor_parallel_size": "devices over which every layer is split"},
}
ALIASES = {
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "tensor_parallel_size": ("-tp",),
    "enforce_eager": ("--skip-precompile",),
}
OWN_FLAGS = {"disable_log_stats"}  # NEUTRAL_ARGUMENTS that the server uses
NEUTRAL_HELP = {
    "trust_remote_code": "no effect: code from a repository is never run",
    "enable_chunked_prefill": "no effect: it is always on",
}
# For streams; offline, whole prompts are faster
SERVER_DEFAULTS = {"max_stall_ms": 50.0}
CHOICES = {
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "attention_backend": ATTENTION_BACKENDS,
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "scheduling_policy": SCHEDULING_POLICIES,
    "logprobs_mode": LOGPROBS_MODES,
    "preemption_mode": PREEMPTION_MODES,
    "runner": RUNNERS,
    "convert": CONVERTS,
}


def flag_type[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader that raises ConfigError as an argparse type."""

    def kind(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return kind


integer, length, real = flag_type(human_int), flag_type(token_count), flag_type(number)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object on the command line."""
    try:
        value = orjson.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object, such as '{{\"enable_thinking\": false}}'"
        )
    return value


# The server's own flags by group: names -> arguments of argparse
SERVER_FLAGS: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {
    "Server": {
        ("--host",): {
            "default": "0.0.0.0",
            "help": "address to listen on",
        },
        ("--port",): {
            "type": int,
            "default": 8000,
            "help": "port to listen on; 0 takes a free one",
        },
        ("--uds",): {
            "default": None,
            "help": "listen on this Unix socket instead of a port",
        },
        ("--served-model-name",): {
            "nargs": "+",
            "action": "extend",
            "default": None,
            "help": "names that clients may use; with several, requests must name one",
        },
        ("--root-path",): {
            "default": "",
            "help": "path under which a proxy shows the server, and which it strips",
        },
        ("--no-page",): {
            "action": "store_true",
            "help": "serve no page at /",
        },
        ("--disable-fastapi-docs",): {
            "action": "store_true",
            "help": "serve neither /docs nor /openapi.json",
        },
        ("--max-body-size",): {
            "type": integer,
            "default": 32 << 20,
            "help": "largest request body in bytes; larger ones get 413",
        },
        ("--shutdown-timeout",): {
            "type": float,
            "default": 30.0,
            "help": "seconds for requests in flight to finish after SIGTERM",
        },
        ("--stall-timeout",): {
            "type": float,
            "default": 60.0,
            "help": "seconds without a step until /health answers 503",
        },
        ("--response-store",): {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "keep responses of /v1/responses in memory for clients that refer to them",
        },
        ("--max-engine-restarts",): {
            "type": integer,
            "default": 3,
            "help": "restarts in a row of an engine process that dies; 0 ends the server instead",
        },
    },
    "Security": {
        ("--api-key",): {
            "nargs": "+",
            "action": "extend",
            "default": None,
            "help": f"keys, one of which clients must send; also from {' or '.join(KEY_VARIABLES)}",
        },
        ("--admin-key",): {
            "nargs": "+",
            "action": "extend",
            "default": None,
            "help": "operator's keys, which open POST /reset_prefix_cache, /start_profile and "
            f"/stop_profile; also from {ADMIN_KEY_VARIABLE}",
        },
        ("--allowed-origins",): {
            "type": orjson.loads,
            "default": [],
            "help": "JSON list of origins for CORS (default: none)",
        },
    },
    "Chat and sampling": {
        ("--chat-template",): {
            "default": None,
            "help": "file (or text) of a chat template that replaces the model's",
        },
        ("--default-chat-template-kwargs",): {
            "type": json_object,
            "default": {},
            "help": "JSON object of template arguments",
        },
        ("--reasoning-parser",): {
            "default": "auto",
            "help": "format of reasoning: a name, none, or auto for the chat template's",
        },
        ("--tool-call-parser",): {
            "default": "auto",
            "help": "format of tool calls: a name, none, or auto for the chat template's",
        },
        ("--allow-special-tokens-in-content",): {
            "action": "store_true",
            "help": "let messages contain control tokens; by default they stay text",
        },
        ("--generation-config",): {
            "default": "auto",
            "help": "sampling defaults: the model's (auto), none (vllm), or a directory's",
        },
        ("--override-generation-config",): {
            "type": json_object,
            "default": {},
            "help": "JSON object of sampling defaults that override the model's",
        },
    },
    "Logging": {
        ("--log-level",): {
            "choices": LOG_LEVELS,
            "type": str.lower,
            "default": "info",
            "help": "least severity that is logged",
        },
        (
            "--log-requests",
            "--enable-log-requests",
        ): {
            "action": "store_true",
            "help": "log each request's size and names of options, never its text",
        },
        ("--disable-log-stats",): {
            "action": "store_true",
            "help": "do not log throughput every ten seconds",
        },
    },
}


class Help(argparse.HelpFormatter):
    """Shows defaults other than none, false and empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = (
            action.default is None
            or action.default is False
            or action.default in ([], {}, "", argparse.SUPPRESS)
        )
        return action.help if hidden else f"{action.help} (default: %(default)s)"


def parser() -> argparse.ArgumentParser:
    """The parser of all flags, in groups."""
    top = argparse.ArgumentParser(
        prog="python -m jaxllm.server",
        description="Serve a Hugging Face model over the OpenAI protocol.",
        formatter_class=Help,
        usage="%(prog)s [MODEL] [options]",
        epilog="--help=sampling lists the sampling options of requests.",
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(EngineConfig)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)} | SERVER_DEFAULTS
    for title, flags in ENGINE_FLAGS.items():
        group = top.add_argument_group(title)
        for name, help in flags.items():
            _engine_flag(group, name, hints[name], defaults[name], help)
    for title, own in SERVER_FLAGS.items():
        group = top.add_argument_group(title)
        for names, arguments in own.items():
            group.add_argument(*names, **arguments)
    _accepted_flags(top.add_argument_group("Accepted for scripts written for other servers"))
    return top


def _engine_flag(group: Any, name: str, hint: Any, default: Any, help: str) -> None:
    flags = ("--" + name.replace("_", "-"), *ALIASES.get(name, ()))
    if hint is bool:
        group.add_argument(
            *flags, dest=name, action=argparse.BooleanOptionalAction, default=default, help=help
        )
        return
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    if kinds == {int, str}:
        kind: Any = length
    else:
        (found,) = kinds
        kind = {int: integer, float: real, str: str}.get(found, json_object)
    group.add_argument(
        *flags,
        dest=name,
        type=kind,
        default=default,
        choices=CHOICES.get(name),
        help=help,
        metavar=None,
    )


def _accepted_flags(group: Any) -> None:
    """The flags of NEUTRAL_ARGUMENTS; `cli._check_neutral_flag` refuses other values."""
    for name, neutral in NEUTRAL_ARGUMENTS.items():
        if name in OWN_FLAGS:
            continue
        flag, accepted = (
            "--" + name.replace("_", "-"),
            [value for value in neutral if value is not None],
        )
        if any(isinstance(value, bool) for value in accepted):
            help = NEUTRAL_HELP.get(name, "no effect")
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            help = (
                f"no effect: {' or '.join(map(str, accepted))} is accepted"
                if accepted
                else "not supported yet"
            )
            group.add_argument(flag, default=None, help=help)
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="no effect: it is always on"
    )
    group.add_argument(
        "--enable-reasoning", action="store_true", help="no effect: see --reasoning-parser"
    )
    group.add_argument(
        "--disable-log-requests", action="store_true", help="no effect: it is the default"
    )
