"""The server's own flags, by groups, and what reads their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import orjson

from jaxllm.config import ConfigError, human_int, number, token_count
from jaxllm.server.logs import FORMATS

LOG_LEVELS = ("debug", "info", "warning", "error")


def flag_type[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader that raises ConfigError as an argparse type."""

    def kind(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return kind


integer = flag_type(human_int)
length = flag_type(token_count)
real = flag_type(number)


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


def json_list(text: str) -> list[str]:
    """A JSON list of strings on the command line."""
    try:
        value = orjson.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON list of strings, such as '[\"https://example.org\"]'"
        )
    return value


# The server's own flags by group: names -> arguments of argparse
SERVER_FLAGS: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {
    "Server": {
        ("--config",): {
            "default": None,
            "help": "YAML file of options under their long names; the environment (JAXLLM_…) and "
            "the command line go before it",
        },
        ("--host",): {
            "default": "0.0.0.0",
            "help": "address to listen on",
        },
        ("--port",): {
            "type": integer,
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
        ("--max-num-queued-tokens",): {
            "type": integer,
            "default": None,
            "help": "tokens of prompts that wait for their first output, at most; further "
            "requests get 503",
        },
        ("--shutdown-timeout",): {
            "type": real,
            "default": 30.0,
            "help": "seconds for requests in flight to finish after SIGTERM",
        },
        ("--stall-timeout",): {
            "type": real,
            "default": 60.0,
            "help": "seconds without a step until /health answers 503",
        },
        ("--response-store",): {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "keep responses of /v1/responses in memory for clients that refer to them",
        },
        ("--data-parallel-size", "-dp"): {
            "type": integer,
            "default": 1,
            "help": "engines of the model, each with --tensor-parallel-size devices of its own; a "
            "request goes to one that has its prefix cached, else to the least loaded",
        },
        ("--visible-devices",): {
            "default": None,
            "metavar": "0,1",
            "help": "numbers of the GPUs that the engines see, as CUDA_VISIBLE_DEVICES takes them; "
            "for several models, each its own",
        },
        ("--start-asleep",): {
            "action": "store_true",
            "help": "put the model to sleep once it is loaded, until POST /wake_up; models that "
            "are loaded after it may have its memory",
        },
        ("--max-engine-restarts",): {
            "type": integer,
            "default": 3,
            "help": "restarts in a row of an engine process that dies; 0 ends the server instead",
        },
    },
    "Security": {
        ("--ssl-certfile",): {
            "default": None,
            "help": "PEM file of the certificate for TLS, and of those above it",
        },
        ("--ssl-keyfile",): {
            "default": None,
            "help": "PEM file of its private key, if it is not in --ssl-certfile",
        },
        ("--ssl-keyfile-password",): {
            "default": None,
            "help": "password of an encrypted key",
        },
        ("--ssl-ca-certs",): {
            "default": None,
            "help": "PEM file of the authorities that sign clients' certificates",
        },
        ("--ssl-cert-reqs",): {
            "type": integer,
            "choices": (0, 1, 2),
            "default": 0,
            "help": "certificates of clients: 0 none, 1 checked if sent, 2 required",
        },
        ("--ssl-ciphers",): {
            "default": None,
            "help": "OpenSSL's list of ciphers for TLS 1.2",
        },
        ("--enable-ssl-refresh",): {
            "action": "store_true",
            "help": "use new certificates when their files change",
        },
        ("--api-key",): {
            "nargs": "+",
            "action": "extend",
            "default": None,
            "help": "keys, one of which clients must send; also from VLLM_API_KEY",
        },
        ("--admin-key",): {
            "nargs": "+",
            "action": "extend",
            "default": None,
            "help": "operator's keys, which open POST /reset_prefix_cache, /sleep, /wake_up, "
            "/update_weights, /start_profile and /stop_profile",
        },
        ("--api-key-file",): {
            "default": None,
            "help": "file of more such keys, one a line; # begins a comment",
        },
        ("--admin-key-file",): {
            "default": None,
            "help": "file of more such keys, one a line",
        },
        ("--hf-token",): {
            "default": None,
            "help": "token for models of the hub that need one; also from HF_TOKEN",
        },
        ("--allowed-origins",): {
            "type": json_list,
            "default": [],
            "help": "JSON list of origins for CORS (default: none)",
        },
        ("--allowed-methods",): {
            "type": json_list,
            "default": ["*"],
            "help": "JSON list of methods for CORS",
        },
        ("--allowed-headers",): {
            "type": json_list,
            "default": ["*"],
            "help": "JSON list of headers for CORS",
        },
        ("--allow-credentials",): {
            "action": "store_true",
            "help": "let pages of the allowed origins send cookies",
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
        ("--stream-interval",): {
            "type": integer,
            "default": 1,
            "help": "tokens of a choice that are sent at a time, after the first; for requests "
            "without stream_interval",
        },
        ("--enable-force-include-usage",): {
            "action": "store_true",
            "help": "usage in every chunk of every stream, as if stream_options asked for it",
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
        ("--log-format",): {
            "choices": FORMATS,
            "default": "text",
            "help": "lines of text, or a JSON object a line with the request's id",
        },
        (
            "--log-requests",
            "--enable-log-requests",
        ): {
            "action": "store_true",
            "help": "log each request's size and names of options, never its text",
        },
        ("--otlp-traces-endpoint",): {
            "default": None,
            "help": "HTTP address of an OpenTelemetry collector for a span of each request; needs "
            "the extra otel",
        },
        ("--disable-log-stats",): {
            "action": "store_true",
            "help": "do not log throughput",
        },
        ("--log-stats-interval",): {
            "type": real,
            "default": 10.0,
            "help": "seconds between lines of throughput, which are logged while there is work",
        },
        ("--access-log",): {
            "action": "store_true",
            "help": "log method, path, status and seconds of each request but probes",
        },
    },
}

# Of the server's options those that each model has of its own
_OF_A_MODEL = frozenset(
    "served_model_name max_num_queued_tokens stall_timeout data_parallel_size visible_devices "
    "max_engine_restarts start_asleep log_requests".split()
)
# Options of the process, which has one of each however many models it serves
SERVER_WIDE = (
    frozenset(
        flag.removeprefix("--").replace("-", "_")
        for group in ("Server", "Security", "Logging")
        for flag, *_ in SERVER_FLAGS[group]
    )
    - _OF_A_MODEL
)
