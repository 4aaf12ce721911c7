"""API keys: every route but the probes and the page needs one, whatever the path looks like."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
from starlette.routing import Route

from jaxllm.server.app import routes
from jaxllm.server.middleware.auth import ADMIN_PATHS, OPEN_PATHS, is_open
from jaxllm.server.state import Cors
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server with two keys under a root path."""
    with Running(
        tokenizer, with_settings(api_keys=("first key", "second")), root_path="/proxy"
    ) as running:
        yield running


def concrete(path: str) -> str:
    """A path of a route without its placeholders."""
    return (
        path.replace("{id:path}", "fake")
        .replace("page/{name:path}", "page/icon.svg")
        .replace("{name:path}", "docs.js")
    )


def status_of(running: Running, method: str, path: str, headers: dict[str, str]) -> int:
    """The status alone: a stream of statistics has no end."""
    body = b"{}" if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with running.begin_raw("\r\n".join([*lines, "", ""]).encode() + body) as connection:
        return connection.status()


def test_every_route_but_the_probes_needs_a_key(guarded: Running) -> None:
    seen = set()
    for route in routes(guarded.server_state).routes:
        assert isinstance(route, Route)
        path = concrete(route.path)
        for method in route.methods or ():
            answer = guarded.request(method, path, b"{}" if method == "POST" else None)
            if is_open(path):
                assert answer.status == 200
            else:
                assert answer.status == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["type"] == "authentication_error"
            seen.add(path)
    assert seen >= OPEN_PATHS
    assert len(seen) > 20


# key sent -> status by kind of route: probes, operator's, others; None is neither 401 nor 403
MATRIX = {
    "client and admin keys": {
        None: (200, 401, 401),
        "wrong": (200, 401, 401),
        "client": (200, 403, None),
        "root": (200, None, None),
    },
    "admin keys": {
        None: (200, 403, None),
        "wrong": (200, 403, None),
        "root": (200, None, None),
    },
    "client keys": {"wrong": (200, 401, 401), "client": (200, 403, None)},
    "no keys": {None: (200, 403, None), "root": (200, 403, None)},
}


@pytest.mark.parametrize("keys", MATRIX)
def test_every_route_opens_to_its_keys_alone(tokenizer: Tokenizer, keys: str) -> None:
    api_keys = ("client",) if "client" in keys else ()
    admin_keys = ("root",) if "admin" in keys else ()
    with Running(tokenizer, with_settings(api_keys=api_keys, admin_keys=admin_keys)) as running:
        for route in routes(running.server_state).routes:
            assert isinstance(route, Route)
            path, methods = concrete(route.path), route.methods or ()
            kind = 0 if is_open(path) else 1 if path in ADMIN_PATHS else 2
            for method, (key, expected) in itertools.product(methods, MATRIX[keys].items()):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                status = status_of(running, method, path, headers)
                if expected[kind] is None:
                    assert status in (200, 400, 404), (method, path, key)
                else:
                    assert status == expected[kind], (method, path, key)
        assert len(running.control.resets) == (keys in ("client and admin keys", "admin keys"))


@pytest.mark.parametrize("key", ["first key", "second"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/models/fake"])
def test_each_key_opens_the_routes(guarded: Running, key: str, path: str) -> None:
    assert guarded.get(path, authorization=f"Bearer {key}").status == 200
    assert guarded.get(path, authorization=f"bearer {key}").status == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic second",
        "second",
        "Bearer first key second",
        "Bearer " + "x" * 50_000,
        "Bearer \xff",
    ],
)
def test_anything_else_does_not(guarded: Running, header: str) -> None:
    assert guarded.get("/v1/models", authorization=header).status == 401


def test_a_key_in_the_query_does_not_count(guarded: Running) -> None:
    assert guarded.get("/v1/models?api_key=second&authorization=Bearer%20second").status == 401


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1/../health", "/v1/%2e%2e/health", "/health/../v1/models", "/V1/MODELS",
        "/v1/models/", "/health/", "/health/x",
        "/proxy/v1/models", "/proxy/health/../v1/models", "/v1/models?x=/health",
        "/v1/models#/health", "/nowhere", "/health;x",
        "/%2fhealth",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_opens_a_guarded_route(guarded: Running, path: str) -> None:
    assert guarded.get(path).status in (401, 404)
    assert guarded.get(path).status == 401 or "health" in path


def test_the_host_header_plays_no_part(guarded: Running) -> None:
    assert guarded.get("/v1/models", host="a/health?x=").status == 401
    assert guarded.get("/v1/models", host="localhost/health").status == 401


def test_a_preflight_without_cors_gets_nothing(guarded: Running) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    answer = guarded.request("OPTIONS", "/v1/chat/completions", None, headers)
    assert answer.status == 401
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_answers_only_the_named_origins(tokenizer: Tokenizer) -> None:
    with Running(
        tokenizer, with_settings(cors=Cors(origins=("https://a.example",)), api_keys=("k",))
    ) as server:
        ask = {"access-control-request-method": "POST"}
        allowed = server.request(
            "OPTIONS", "/v1/chat/completions", None, {"origin": "https://a.example", **ask}
        )
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = server.request(
            "OPTIONS", "/v1/chat/completions", None, {"origin": "https://b.example", **ask}
        )
        assert "access-control-allow-origin" not in other.headers
        assert server.get("/v1/models", origin="https://a.example").status == 401


def test_cors_allows_the_methods_and_headers_that_the_operator_names(tokenizer: Tokenizer) -> None:
    cors = Cors(
        origins=("https://a.example",),
        methods=("POST",),
        headers=("authorization",),
        credentials=True,
    )
    with Running(tokenizer, with_settings(cors=cors)) as server:

        def preflight(method: str, header: str) -> tuple[int, str | None]:
            answer = server.request(
                "OPTIONS",
                "/v1/completions",
                None,
                {
                    "origin": "https://a.example",
                    "access-control-request-method": method,
                    "access-control-request-headers": header,
                },
            )
            return answer.status, answer.headers.get("access-control-allow-credentials")

        assert preflight("POST", "authorization") == (200, "true")
        assert preflight("DELETE", "authorization")[0] == 400
        assert preflight("POST", "x-other")[0] == 400
        seen = server.get("/health", origin="https://a.example").headers
        assert "x-request-id" in seen["access-control-expose-headers"]


# Routes of vLLM that change a server, under the names that it gives them
OPERATORS = re.compile(
    r"/(sleep|wake_up|pause|resume|reset_\w+_cache|(start|stop)_profile|collective_rpc|abort_requests"
    r"|\w*weights?\w*|v1/(un)?load_lora_adapter|release_kv_cache_memory|scale_elastic_ep"
    r"|flush_cache)"
)


def test_every_route_that_changes_the_server_is_the_operators(server: Running) -> None:
    paths = {route.path for route in routes(server.server_state).routes if isinstance(route, Route)}
    assert {path for path in paths if OPERATORS.fullmatch(path)} == ADMIN_PATHS


def test_operators_routes_are_closed_without_a_key_of_theirs(
    guarded: Running, server: Running
) -> None:
    for running, headers in ((server, {}), (guarded, {"authorization": "Bearer second"})):
        for path in sorted(ADMIN_PATHS):
            refused = running.post(path, b"", **headers)
            assert (refused.status, refused.error["code"]) == (403, "admin_key_needed")
            assert "--admin-key" in refused.error["message"]
    assert guarded.control.resets == server.control.resets == []


def test_an_operators_key_opens_every_route_and_a_clients_does_not(tokenizer: Tokenizer) -> None:
    with Running(tokenizer, with_settings(api_keys=("client",), admin_keys=("root",))) as running:
        client, root = {"authorization": "Bearer client"}, {"authorization": "Bearer root"}
        assert (
            running.get("/v1/models", **root).status
            == running.get("/v1/models", **client).status
            == 200
        )
        assert running.post("/reset_prefix_cache", b"", **client).status == 403
        assert running.post("/reset_prefix_cache", b"").status == 401
        done = running.post("/reset_prefix_cache?reset_running_requests=true", b"", **root)
        assert (done.status, done.body) == (200, b"")
        assert running.post("/reset_prefix_cache", b"", **root).status == 200
        assert (
            running.post("/reset_prefix_cache?reset_running_requests=perhaps", b"", **root).error[
                "param"
            ]
            == "reset_running_requests"
        )
        assert running.control.resets == [True, False]
        running.control.busy = True
        busy = running.post("/reset_prefix_cache", b"", **root)
        assert busy.status == 400
        assert "reset_running_requests=true" in busy.error["message"]
