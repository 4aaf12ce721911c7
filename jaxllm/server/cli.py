"""The command line: flags by groups, every field of EngineConfig under its own name, checked before
anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    check_neutral,
    human_int,
    number,
    token_count,
)
from jaxllm.sampling.defaults import checked_override
from jaxllm.sampling.options import OPTIONS, default_of
from jaxllm.sampling.values import legal
from jaxllm.server.errors import ApiError
from jaxllm.server.openai.chat import check_template_kwargs
from jaxllm.server.state import Settings

KEY_VARIABLES = ("JAXLLM_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "JAXLLM_ADMIN_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")

# Flags of EngineConfig's fields by group: field -> help. Types and defaults come from the
# dataclass.
ENGINE_FLAGS: dict[str, dict[str, str]] = {
    "Model": {
        "model": "a local Hugging Face directory, a hub id (owner/name), or demo, the built-in model",
        "tokenizer": "directory or hub id of the tokenizer, when it is not the model's own",
        "skip_tokenizer_init": "run without a tokenizer: token ids in, token ids out",
        "revision": "branch, tag or commit of a hub model",
        "download_dir": "where hub models are kept",
        "load_format": "auto and safetensors read the checkpoint; dummy makes random weights",
        "dtype": "type of weights and activations; auto: float32 on CPU, else the checkpoint's, with bfloat16 for float32",
        "max_model_len": "longest sequence in tokens: a number, 32k, or auto for the longest that fits",
        "seed": "seed of requests that bring none, and of dummy weights",
        "max_logprobs": "most log-probabilities per token that a request may ask for",
        "logprobs_mode": "log-probabilities, or logits themselves, of the model (raw) or of what tokens are drawn by (processed)",
        "enforce_eager": "compile programs on first use instead of at start",
        "compilation_cache_dir": "where compiled programs are kept between starts",
        "attention_backend": "how attention is computed; by default the device's fastest that takes the model",
    },
    "Memory": {
        "gpu_memory_utilization": "fraction of device memory for weights, workspace and KV pages",
        "kv_cache_memory_bytes": "size of the KV pool in bytes, instead of the fraction",
        "num_gpu_blocks_override": "number of KV pages, instead of the fraction; of layers without a window, where others have one",
        "block_size": "tokens per KV page",
        "kv_cache_dtype": "type of the KV pages: fp8 (= fp8_e4m3) and fp8_e5m2 take half the memory; auto: as the checkpoint says",
        "kv_offloading_size": "GiB of host memory for cached prefixes that the pool has no room for",
        "enable_prefix_caching": "share the KV pages of equal prompt beginnings",
    },
    "Scheduler": {
        "max_num_seqs": "most sequences that run at once",
        "max_num_batched_tokens": "most tokens in one step",
        "max_num_queued_reqs": "most requests that wait; more get 503",
        "max_stall_ms": "prompts run in chunks so small that streams wait no longer than about this many milliseconds for their next token",
        "scheduling_policy": "fcfs: first come, first served; priority: a request's priority is a head start, so that nobody starves",
        "preemption_mode": "recompute what was preempted for want of pages, or swap it to host memory and back",
        "swap_space": "GiB of host memory per device for --preemption-mode swap (4 when left out)",
        "scheduler_cls": "module:Class of a scheduler of your own, a subclass of jaxllm.engine.scheduling.scheduler.Scheduler",
        "batch_invariant": "the same tokens for a request whatever runs beside it, on accelerators too (slower; docs/sampling.md)",
        "async_scheduling": "plan the next step while the device runs the current one",
    },
    "Profiling": {
        "profiler_dir": "take POST /start_profile and /stop_profile, and write JAX's traces here"
    },
    "Parallel": {"tensor_parallel_size": "devices over which every layer is split"},
}
ALIASES = {
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "tensor_parallel_size": ("-tp",),
    "enforce_eager": ("--skip-precompile",),
}
OWN_FLAGS = {"disable_log_stats"}  # of NEUTRAL_ARGUMENTS, those that mean something to the server
NEUTRAL_HELP = {
    "trust_remote_code": "changes nothing: code from a repository is never run",
    "enable_chunked_prefill": "changes nothing: it is always on",
}
# Where streams are watched; offline, whole prompts are faster
SERVER_DEFAULTS = {"max_stall_ms": 50.0}
CHOICES = {
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "attention_backend": ATTENTION_BACKENDS,
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "scheduling_policy": SCHEDULING_POLICIES,
    "logprobs_mode": LOGPROBS_MODES,
    "preemption_mode": PREEMPTION_MODES,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that the command line decides."""

    config: EngineConfig
    settings: Settings
    host: str
    port: int
    uds: str | None
    shutdown_timeout: float
    max_engine_restarts: int
    log_level: str
    log_stats: bool
    chat_template: str | None
    generation_config: str
    override_generation_config: dict[str, Any]
    root_path: str


def flag_type[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader that raises ConfigError, in the form that argparse asks for."""

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
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object, such as '{{\"enable_thinking\": false}}'"
        )
    return value


class Help(argparse.HelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = (
            action.default is None
            or action.default is False
            or action.default in ([], {}, "", argparse.SUPPRESS)
        )
        return action.help if silent else f"{action.help} (default: %(default)s)"


def parser() -> argparse.ArgumentParser:
    """All flags, in groups."""
    top = argparse.ArgumentParser(
        prog="python -m jaxllm.server",
        description="Serve a Hugging Face model over the OpenAI protocol.",
        formatter_class=Help,
        usage="%(prog)s [MODEL] [options]",
        epilog="--help=sampling lists the sampling options that requests may carry.",
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(EngineConfig)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)} | SERVER_DEFAULTS
    for title, flags in ENGINE_FLAGS.items():
        group = top.add_argument_group(title)
        for name, help in flags.items():
            _engine_flag(group, name, hints[name], defaults[name], help)
    _server_flags(top.add_argument_group("Server"))
    _security_flags(top.add_argument_group("Security"))
    _chat_flags(top.add_argument_group("Chat and sampling"))
    _logging_flags(top.add_argument_group("Logging"))
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
        kind = {int: integer, float: real, str: str}[kinds.pop()]
    group.add_argument(
        *flags,
        dest=name,
        type=kind,
        default=default,
        choices=CHOICES.get(name),
        help=help,
        metavar=None,
    )


def _server_flags(group: Any) -> None:
    group.add_argument("--host", default="0.0.0.0", help="address to listen on")
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 takes a free one"
    )
    group.add_argument("--uds", default=None, help="listen on this Unix socket instead of a port")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=None,
        help="names that clients may use; the first one is shown",
    )
    group.add_argument(
        "--root-path",
        default="",
        help="path under which a proxy shows the server, and which it takes off the paths it hands on",
    )
    group.add_argument(
        "--max-body-size",
        type=integer,
        default=32 << 20,
        help="largest request body in bytes; larger ones get 413",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that requests in flight get after SIGTERM",
    )
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=60.0,
        help="seconds without a step after which /health says 503",
    )
    group.add_argument(
        "--max-engine-restarts",
        type=integer,
        default=3,
        help="restarts in a row of an engine process that dies; 0 ends the server instead",
    )


def _security_flags(group: Any) -> None:
    keys = " or ".join(KEY_VARIABLES)
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=None,
        help=f"keys of which clients must send one; also from {keys}",
    )
    help = f"keys that open POST /reset_prefix_cache, which is closed without one; also from {ADMIN_KEY_VARIABLE}"
    group.add_argument("--admin-key", nargs="+", action="extend", default=None, help=help)
    group.add_argument(
        "--allowed-origins",
        type=json.loads,
        default=[],
        help="JSON list of origins for CORS; none by default",
    )


def _chat_flags(group: Any) -> None:
    group.add_argument(
        "--chat-template",
        default=None,
        help="file (or text) of a chat template that replaces the model's",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        help="JSON object of template arguments",
    )
    group.add_argument(
        "--allow-special-tokens-in-content",
        action="store_true",
        help="let users write control tokens in messages; by default they stay text",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        help="auto takes the model's sampling defaults, vllm none, a directory its own",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        help="JSON object of sampling defaults that go before the model's",
    )


def _logging_flags(group: Any) -> None:
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, type=str.lower, default="info", help="how much to say"
    )
    group.add_argument(
        "--log-requests",
        "--enable-log-requests",
        action="store_true",
        help="log each request's size and options, never its text",
    )
    group.add_argument(
        "--disable-log-stats", action="store_true", help="no line of throughput every ten seconds"
    )


def _accepted_flags(group: Any) -> None:
    """Those of NEUTRAL_ARGUMENTS; `_refuse_arguments` refuses what is not neutral."""
    for name, neutral in NEUTRAL_ARGUMENTS.items():
        if name in OWN_FLAGS:
            continue
        flag, accepted = (
            "--" + name.replace("_", "-"),
            [value for value in neutral if value is not None],
        )
        if any(isinstance(value, bool) for value in accepted):
            help = NEUTRAL_HELP.get(name, "changes nothing")
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            help = (
                f"changes nothing: {' or '.join(map(str, accepted))} is accepted"
                if accepted
                else "not supported yet"
            )
            group.add_argument(flag, default=None, help=help)
    group.add_argument(
        "--disable-log-requests", action="store_true", help="changes nothing: it is the default"
    )


def parse(argv: list[str], environ: Mapping[str, str]) -> Options:
    """Options of the command line. Exits with 2 and a usage line on flags that cannot be."""
    top = parser()
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    if "--help=sampling" in argv:
        print(sampling_help())
        top.exit(0)
    args = top.parse_args(argv)
    try:
        return _options(args, environ)
    except (ConfigError, ApiError) as error:
        top.exit(2, f"{top.prog}: error: {error}\n")


def _options(args: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}")
    for name, least in {
        "max_body_size": 1,
        "shutdown_timeout": 0,
        "stall_timeout": 1,
        "max_engine_restarts": 0,
    }.items():
        if not least <= getattr(args, name) < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a number from {least}, got {getattr(args, name)}"
            )
    if any(not name for name in args.served_model_name or ()):
        raise ConfigError("--served-model-name must not be empty")
    keys = tuple(args.api_key or [environ[name] for name in KEY_VARIABLES if environ.get(name)])
    admin_keys = tuple(args.admin_key or filter(None, [environ.get(ADMIN_KEY_VARIABLE)]))
    if any(not key for key in (*keys, *admin_keys)):
        raise ConfigError("--api-key and --admin-key must not be empty")
    if not isinstance(args.allowed_origins, list) or not all(
        isinstance(origin, str) for origin in args.allowed_origins
    ):
        raise ConfigError(
            "--allowed-origins must be a JSON list of strings, such as '[\"https://example.org\"]'"
        )
    _refuse_arguments(args)
    config = EngineConfig(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)}
    )
    settings = Settings(
        served=tuple(dict.fromkeys(args.served_model_name or [args.model])),
        root=args.model,
        api_keys=keys,
        admin_keys=admin_keys,
        max_body_size=args.max_body_size,
        stall_seconds=args.stall_timeout * (10 if args.enforce_eager else 1),  # a step may compile
        log_requests=args.log_requests,
        allow_special_tokens=args.allow_special_tokens_in_content,
        allowed_origins=tuple(args.allowed_origins),
        template_kwargs=check_template_kwargs(args.default_chat_template_kwargs),
    )
    return Options(
        config=config,
        settings=settings,
        host=args.host,
        port=args.port,
        uds=args.uds,
        shutdown_timeout=args.shutdown_timeout,
        max_engine_restarts=args.max_engine_restarts,
        log_level=args.log_level,
        log_stats=not args.disable_log_stats,
        chat_template=args.chat_template,
        generation_config=args.generation_config,
        override_generation_config=checked_override(args.override_generation_config),
        root_path=args.root_path.rstrip("/"),
    )


def _refuse_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError on a flag of NEUTRAL_ARGUMENTS that asks for something."""
    for name in NEUTRAL_ARGUMENTS.keys() - OWN_FLAGS:
        value = getattr(args, name)
        flag = name.replace("_", "-")
        if isinstance(value, str):
            check_neutral(
                name,
                int(value) if value.isdecimal() and len(value) < 20 else value,
                f"--{flag} {value:.80}",
            )
        else:
            check_neutral(name, value, f"--no-{flag}" if value is False else f"--{flag}")


def sampling_help() -> str:
    """The table of sampling options that requests may carry, as text."""
    rows = [(name, str(default_of(name)), legal(row), row.doc) for name, row in OPTIONS.items()]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join(["Sampling options of a request: name, default, legal values.", "", *lines])


def check_generation_config(choice: str) -> None:
    """`auto`, `vllm`, or a directory. Raises ConfigError."""
    if choice not in ("auto", "vllm") and not Path(choice).is_dir():
        raise ConfigError(f"--generation-config must be auto, vllm or a directory, got {choice}")
