"""The command line as options, checked before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config import NEUTRAL_ARGUMENTS, ConfigError, EngineConfig, check_neutral
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.kv_transfer.settings import KVTransferSettings
from jaxllm.sampling.defaults import checked_override
from jaxllm.sampling.options import OPTIONS, default_of
from jaxllm.sampling.values import OptionError, checked, legal
from jaxllm.server.command_line.accepted import ACCEPTED, check_accepted
from jaxllm.server.command_line.flags import NEUTRAL_REASONS, OWN_FLAGS, parser
from jaxllm.server.command_line.help import help_text
from jaxllm.server.command_line.layers import Given, read_options
from jaxllm.server.command_line.secret_files import read_keys
from jaxllm.server.errors import ApiError
from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.requests.conversation import check_template_kwargs
from jaxllm.server.state import Cors, Settings
from jaxllm.server.tracing import Tracing
from jaxllm.server.transport.tls import Certificates, TlsFiles


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options.

    Attributes:
        data_parallel_size: engines of the model, each with devices of its own.
        inherited_devices: CUDA_VISIBLE_DEVICES of this process.
        summary: the options that are not defaults and where they come from, without secrets.
        start_asleep: whether the model sleeps once it is loaded.
        stats_seconds: between log lines of throughput; 0: there are none.
        max_queued_tokens: see `EngineClient`.
        tls: certificates; None: plain HTTP.
        tls_refresh: whether new certificates are used when their files change.
        tracing: where spans of requests go, if anywhere.
        notices: lines for the log about flags and variables without effect.
    """

    config: EngineConfig
    settings: Settings
    host: str
    port: int
    uds: str | None
    shutdown_timeout: float
    max_engine_restarts: int
    start_asleep: bool
    data_parallel_size: int
    visible_devices: str | None
    inherited_devices: str | None
    log_level: str
    log_format: str
    stats_seconds: float
    access_log: bool
    max_queued_tokens: int | None
    chat_template: str | None
    generation_config: str
    override_generation_config: dict[str, Any]
    stream_interval: int
    root_path: str
    tls: Certificates | None
    tls_refresh: bool
    tracing: Tracing | None
    hf_token: str | None
    summary: str
    notices: tuple[str, ...]


PROGRAM = "python -m jaxllm.server"


def parse(argv: list[str], environ: Mapping[str, str], prog: str = PROGRAM) -> Options:
    """The options in `argv`, in JAXLLM_… of the environment and in the --config file; of several
    models those of the first. Exits with status 2 on illegal ones."""
    return parse_models(argv, environ, prog)[0]


def parse_models(argv: list[str], environ: Mapping[str, str], prog: str = PROGRAM) -> list[Options]:
    """The options of each model, as `read_options` finds them."""
    top = parser(prog)
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    for word in argv:
        flag, _, topic = word.partition("=")
        if flag in ("-h", "--help"):
            print(sampling_help() if topic == "sampling" else help_text(top, topic))
            top.exit(0)
    try:
        models = [_options(choices, environ) for choices in read_options(top, argv, environ)]
        _check_names(models)
        _check_events(models)
        _check_transfers(models)
        _check_group(models)
        return models
    except (ConfigError, ApiError) as error:
        top.exit(2, f"{top.prog}: error: {error}\n")


def _check_names(models: list[Options]) -> None:
    """Raise ConfigError when a name would be that of two models."""
    names = [name for options in models for name in options.settings.served]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two models would be served as {twice}; give each a served-model-name of its own "
            "under models in a --config file"
        )


def _check_events(models: list[Options]) -> None:
    """Raise ConfigError when two engines would bind to one address for their KV events."""
    bound = [
        address
        for options in models
        if (events := options.settings.kv_events) is not None and events.publisher != "null"
        for number in range(options.data_parallel_size)
        for address in events.of_engine(number).bound
    ]
    twice = next((address for address in bound if bound.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two engines would publish KV events at {twice}; give each model a kv-events-config "
            "of its own under models in a --config file"
        )


def _check_transfers(models: list[Options]) -> None:
    """Raise ConfigError for pages between engines that can never travel, before any engine is
    started: also where the shared key cannot be read."""
    for options in models:
        transfer = KVTransferSettings.of(options.config)
        if transfer is not None:
            transfer.read_key()


def _check_group(models: list[Options]) -> None:
    """Raise ConfigError unless several hosts run one engine."""
    if all(options.config.nnodes == 1 for options in models):
        return
    if len(models) > 1 or models[0].data_parallel_size > 1:
        raise ConfigError("several hosts run one engine of one model; start a group for each")


def _check_values(args: argparse.Namespace) -> None:
    """Raise ConfigError on values that argparse takes and the server does not."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}")
    for name, least in {
        "max_body_size": 1,
        "shutdown_timeout": 0,
        "stall_timeout": 1,
        "max_engine_restarts": 0,
        "data_parallel_size": 1,
        "log_stats_interval": 0,
    }.items():
        if not least <= getattr(args, name) < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a number from {least}, "
                f"got {getattr(args, name)}"
            )
    try:
        checked("--stream-interval", OPTIONS["stream_interval"], args.stream_interval)
    except OptionError as error:
        raise ConfigError(str(error)) from None
    if any(not name for name in args.served_model_name or ()):
        raise ConfigError("--served-model-name must not be empty")
    if any(not key for key in (*(args.api_key or ()), *(args.admin_key or ()))):
        raise ConfigError("--api-key and --admin-key must not be empty")
    if args.max_num_queued_tokens is not None and args.max_num_queued_tokens < 1:
        raise ConfigError(
            f"--max-num-queued-tokens must be at least 1, got {args.max_num_queued_tokens}"
        )
    for name in NEUTRAL_ARGUMENTS.keys() - OWN_FLAGS:
        _check_neutral_flag(name, getattr(args, name))
    try:
        find_formats(args.reasoning_parser, args.tool_call_parser, None)
    except ValueError as error:
        raise ConfigError(f"--reasoning-parser or --tool-call-parser: {error}") from None


def _options(choices: Given, environ: Mapping[str, str]) -> Options:
    args = choices.args
    endpoint = args.otlp_traces_endpoint
    _check_values(args)
    notices = [*choices.notices, *_neutral_notices(choices), *check_accepted(_accepted(args))]
    keys, key_notices = read_keys(args.api_key, args.api_key_file, "--api-key-file")
    admin_keys, more = read_keys(args.admin_key, args.admin_key_file, "--admin-key-file")
    config = EngineConfig(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)}
    )
    return Options(
        config=config,
        settings=_settings(args, config, keys, admin_keys),
        host=args.host,
        port=args.port,
        uds=args.uds,
        shutdown_timeout=args.shutdown_timeout,
        # The others would wait for a process that has gone: whoever started the group starts it
        max_engine_restarts=args.max_engine_restarts if config.nnodes == 1 else 0,
        start_asleep=args.start_asleep,
        data_parallel_size=args.data_parallel_size,
        visible_devices=args.visible_devices,
        inherited_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        log_level=args.log_level,
        log_format=args.log_format,
        stats_seconds=0 if args.disable_log_stats else args.log_stats_interval,
        access_log=args.access_log,
        max_queued_tokens=args.max_num_queued_tokens,
        chat_template=args.chat_template,
        generation_config=args.generation_config,
        override_generation_config=checked_override(args.override_generation_config),
        stream_interval=args.stream_interval,
        root_path=args.root_path.rstrip("/"),
        tls=_certificates(args),
        tls_refresh=args.enable_ssl_refresh,
        tracing=None if endpoint is None else Tracing(endpoint),
        hf_token=args.hf_token,
        summary=choices.shown(),
        notices=(*notices, *key_notices, *more),
    )


def _settings(
    args: argparse.Namespace, config: EngineConfig, keys: tuple[str, ...], admin: tuple[str, ...]
) -> Settings:
    """What requests are served with. Raises ConfigError."""
    return Settings(
        served=tuple(dict.fromkeys(args.served_model_name or [args.model])),
        root=args.model,
        api_keys=keys,
        admin_keys=admin,
        max_body_size=args.max_body_size,
        stall_seconds=args.stall_timeout * (10 if args.enforce_eager else 1),  # a step may compile
        log_requests=args.log_requests,
        allow_special_tokens=args.allow_special_tokens_in_content,
        cors=_cors(args),
        force_usage=args.enable_force_include_usage,
        template_kwargs=check_template_kwargs(args.default_chat_template_kwargs),
        page=not args.no_page,
        docs=not args.disable_fastapi_docs,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        response_store=args.response_store,
        kv_events=KVEventSettings.read(config.kv_events_config),
    )


def _cors(args: argparse.Namespace) -> Cors:
    return Cors(
        origins=tuple(args.allowed_origins),
        methods=tuple(args.allowed_methods),
        headers=tuple(args.allowed_headers),
        credentials=args.allow_credentials,
    )


def _certificates(args: argparse.Namespace) -> Certificates | None:
    """What --ssl-… makes. Raises ConfigError."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs or args.enable_ssl_refresh:
            raise ConfigError("--ssl-… needs a certificate: set --ssl-certfile")
        return None
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {args.ssl_cert_reqs} checks clients' certificates: "
            "set --ssl-ca-certs to those of their authorities"
        )
    files = TlsFiles(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        password=args.ssl_keyfile_password,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
        ciphers=args.ssl_ciphers,
    )
    return Certificates(files)


def _accepted(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of ACCEPTED that were given, with their values."""
    values = {name: getattr(args, name.replace("-", "_")) for name in ACCEPTED}
    return {name: value for name, value in values.items() if value is not None}


def _neutral_notices(choices: Given) -> list[str]:
    return [
        f"--{name.replace('_', '-')} changes nothing{NEUTRAL_REASONS.get(name, '')}"
        for name in sorted(choices.sources.keys() & NEUTRAL_ARGUMENTS.keys() - OWN_FLAGS)
    ]


def _check_neutral_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless the value of a flag of NEUTRAL_ARGUMENTS changes nothing."""
    flag = name.replace("_", "-")
    if isinstance(value, str):
        shown = f"--{flag} {value:.80}"
        if value.isdecimal() and len(value) < 20:
            value = int(value)
    else:
        if value is False:
            shown = f"--no-{flag}"
        else:
            shown = f"--{flag}"
    check_neutral(name, value, shown)


def sampling_help() -> str:
    """The table of requests' sampling options, as text."""
    rows = [(name, str(default_of(name)), legal(row), row.doc) for name, row in OPTIONS.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join(["Sampling options of a request: name, default, legal values.", "", *lines])


def check_generation_config(choice: str) -> None:
    """Raise ConfigError unless `choice` is auto, vllm or a directory."""
    if choice not in ("auto", "vllm") and not Path(choice).is_dir():
        raise ConfigError(f"--generation-config must be auto, vllm or a directory, got {choice}")
