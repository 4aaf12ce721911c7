"""`kv_transfer_params` as routers of prefill and decode servers send it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.two_legs import FIRST_LEG as LEG
from jaxllm.config import EngineConfig
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

OFFER = {"do_remote_prefill": True, "remote_port": 7}
# What routers send to the prefill server
NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED]
ONE = {"max_tokens": 1, "min_tokens": 1, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
    },
}


@pytest.fixture(scope="module")
def sharing(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server whose engine has an offer."""
    config = EngineConfig(model="fake", kv_transfer_config=dict(OFFER))
    with Running(tokenizer, config=config) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_a_prefill_leg_is_answered_with_what_the_decode_leg_needs(sharing, path):
    reply = sharing.post(path, BODIES[path] | ONE | {"kv_transfer_params": LEG})
    assert reply.status == 200 and reply.json()["kv_transfer_params"] == OFFER
    assert sharing.control.added[-1].shares_pages
    sharing.post(path, BODIES[path] | {"kv_transfer_params": OFFER, "max_tokens": 3})
    assert sharing.control.added[-1].page_offer == OFFER
    assert not sharing.control.added[-1].shares_pages


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "given", [None, {}, LEG | {"do_remote_decode": False}], ids=["null", "empty", "neither"]
)
def test_other_requests_get_no_such_field(sharing, path, given):
    reply = sharing.post(path, BODIES[path] | {"kv_transfer_params": given})
    assert reply.status == 200 and "kv_transfer_params" not in reply.json()
    added = sharing.control.added[-1]
    assert (added.shares_pages, added.page_offer) == (False, None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("yes", "must be an object"),
        ({"do_remote_decode": 1}, "do_remote_decode must be true or false"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill must be true or false"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "not both"),
        ({"do_remote_prefill": True, "remote_host": "x" * 5000}, "4096"),
        ({"x": NESTED}, "deeper than"),
    ],
    ids=["text", "number", "flag", "both", "long", "deep"],
)
def test_what_is_no_such_object_is_refused(sharing, given, why):
    before = len(sharing.control.added)
    reply = sharing.post(
        "/v1/completions", {"model": "fake", "prompt": "hi", "kv_transfer_params": given}
    )
    assert reply.status == 400 and why in reply.json()["error"]["message"], reply.json()
    assert reply.json()["error"]["param"].startswith("kv_transfer_params")
    assert len(sharing.control.added) == before


def test_a_prefill_leg_is_not_streamed(sharing):
    body = {"model": "fake", "prompt": "hi", "kv_transfer_params": LEG, "stream": True}
    reply = sharing.post("/v1/completions", body)
    assert reply.status == 400 and "not streamed" in reply.json()["error"]["message"]
