"""Request targets in absolute form, as clients of proxies send them (RFC 9112, 3.2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server with a key under a root path."""
    with Running(tokenizer, with_settings(api_keys=("k",)), root_path="/proxy") as running:
        yield running


def status(server: Running, target: str, key: str = "") -> int:
    """The status of a GET of `target` as it stands."""
    head = f"GET {target} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n\r\n"
    with server.begin_raw(head.encode()) as sock:
        return sock.status()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://host/v1/models", 200),
        ("HTTPS://user@host:8000/v1/models?x=1", 200),
        ("http://host/v1/models/fake", 200),
        ("http://host/health", 200),
        ("http://host", 200),
        ("http://host?x=/health", 200),
        ("ftp://host/v1/models", 404),
        ("/http://host/v1/models", 404),
        ("http:%2F%2Fhost/v1/models", 404),
    ],
)
def test_an_absolute_target_asks_for_its_path(server: Running, target: str, expected: int) -> None:
    assert status(server, target) == expected


@pytest.mark.parametrize(
    ("target", "without", "with_key"),
    [
        ("http://host/v1/models", 401, 200),
        ("http://host/proxy/v1/models", 401, 404),
        ("http://host/health", 200, 200),
        ("http://health/v1/models", 401, 200),
        ("http://host/v1/%6dodels", 401, 200),
    ],
)
def test_no_absolute_target_passes_a_guard(
    guarded: Running, target: str, without: int, with_key: int
) -> None:
    assert status(guarded, target) == without
    assert status(guarded, target, "k") == with_key
