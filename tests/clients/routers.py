"""Routers that people put before replicas, each installed into a venv of its own."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest

from tests.clients.environments import run

START_SECONDS = 120
IN_LEGS = "disaggregated_prefill_orchestrated"  # one replica computes prompts, the other goes on
SESSION = "x-session"  # the header by which a router keeps a client with one replica
STACK = (
    "git+https://github.com/vllm-project/production-stack@a6c01db05f65f556235413ba8dbcfb0c01132fff"
)


@dataclass(frozen=True)
class Replica:
    """A server behind a router. `events` and `replays` are its addresses of KV events, if any."""

    url: str
    events: str = ""
    replays: str = ""


type Command = Callable[[pathlib.Path, str, str, list[Replica]], list[str]]


@dataclass(frozen=True)
class Router:
    """A package, and the command that starts it: of its venv, a policy, a port and replicas."""

    name: str
    package: str
    command: Command
    policies: tuple[str, ...]


@dataclass(frozen=True)
class Gateway:
    """A running router."""

    url: str
    key: str


def vllm_router(venv: pathlib.Path, policy: str, port: str, replicas: list[Replica]) -> list[str]:
    """https://github.com/vllm-project/router"""
    events: list[str] = []
    if policy == "kv_aware":
        events = ["--kv-event-model", "demo", "--kv-event-block-size", "16"]
        for replica in replicas:
            events += ["--kv-event-source", f"{replica.url}={replica.events}"]
            events += ["--kv-event-replay-source", f"{replica.url}={replica.replays}"]
    return [
        *(str(venv / "bin" / "vllm-router"), "--worker-startup-check-interval", "1"),
        *rust_arguments(policy, port, replicas),
        *events,
    ]


def smg(venv: pathlib.Path, policy: str, port: str, replicas: list[Replica]) -> list[str]:
    """https://github.com/lightseekorg/smg"""
    return [str(venv / "bin" / "smg"), "launch", *rust_arguments(policy, port, replicas)]


def rust_arguments(policy: str, port: str, replicas: list[Replica]) -> list[str]:
    """What the two routers that have one ancestor are both told."""
    return [
        *("--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()),
        *("--policy", policy, "--worker-urls", *(replica.url for replica in replicas)),
    ]


def production_stack(
    venv: pathlib.Path, policy: str, port: str, replicas: list[Replica]
) -> list[str]:
    """https://github.com/vllm-project/production-stack"""
    asked = ["--session-key", SESSION] if policy == "session" else []
    if policy == "prefixaware":  # it goes by texts, in pieces of 128 letters
        asked = ["--prefix-min-match-length", "1"]
    if policy == IN_LEGS:
        asked = ["--static-model-labels", "first,second"]
        asked += ["--prefill-model-labels", "first", "--decode-model-labels", "second"]
    return [
        *(str(venv / "bin" / "python"), "-m", "vllm_router.app", "--service-discovery", "static"),
        *("--host", "127.0.0.1", "--port", port, "--routing-logic", policy),
        *("--static-backends", ",".join(replica.url for replica in replicas)),
        *("--static-models", ",".join("demo" for _ in replicas)),
        *("--max-instance-failover-reroute-attempts", "1", *asked),
    ]


def litellm(venv: pathlib.Path, policy: str, port: str, replicas: list[Replica]) -> list[str]:
    """https://github.com/BerriAI/litellm, as a proxy"""
    config = {
        "model_list": [
            {
                "model_name": "demo",
                "litellm_params": {
                    "model": "hosted_vllm/demo",
                    "api_base": f"{replica.url}/v1",
                    "api_key": "none",
                },
            }
            for replica in replicas
        ],
        "router_settings": {"routing_strategy": policy},
        "general_settings": {"master_key": "os.environ/LITELLM_MASTER_KEY"},
    }
    path = venv / "config.yaml"
    path.write_text(json.dumps(config))  # which is YAML, too
    program = str(venv / "bin" / "litellm")
    return [program, "--config", str(path), "--host", "127.0.0.1", "--port", port]


PRODUCTION_STACK = Router(
    "production-stack",
    f"vllm-router @ {STACK}",
    production_stack,
    ("roundrobin", "session", "prefixaware"),
)
ROUTERS = [
    Router(
        "vllm-router",
        "vllm-router==0.1.17",
        vllm_router,
        ("round_robin", "cache_aware", "kv_aware"),
    ),
    Router("smg", "smg==1.13.0", smg, ("round_robin", "cache_aware")),
    PRODUCTION_STACK,
    Router("litellm", "litellm[proxy]==1.106.2", litellm, ("simple-shuffle",)),
]


@cache
def installed(package: str, folder: pathlib.Path) -> bool:
    """Whether a venv has a package. It is tried once, for a package index may be slow to refuse."""
    assert run([sys.executable, "-m", "venv", str(folder)]).returncode == 0
    done = run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", package])
    return done.returncode == 0


@contextmanager
def started(
    router: Router, policy: str, replicas: list[Replica], venvs: pathlib.Path
) -> Iterator[Gateway]:
    """The router before these replicas, once it answers. Skips the test where it cannot be had."""
    venv = venvs / router.name
    if not installed(router.package, venv):
        pytest.skip(f"{router.package} cannot be installed here")
    port, key = free_port(), f"sk-{secrets.token_hex(24)}"
    log = (venv / "log").open("w+")
    process = subprocess.Popen(
        router.command(venv, policy, port, replicas),
        env=os.environ | {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=venv,
    )
    gateway = Gateway(f"http://127.0.0.1:{port}", key)
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(gateway):
            log.seek(0)
            assert process.poll() is None and time.monotonic() < until, log.read()[-4000:]
            time.sleep(0.2)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def answers(gateway: Gateway) -> bool:
    """Whether a router takes requests."""
    request = urllib.request.Request(
        f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {gateway.key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return b"demo" in reply.read()
    except OSError:
        return False


def free_port() -> str:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])
