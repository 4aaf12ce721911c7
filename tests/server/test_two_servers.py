"""A router's two legs through two real servers: one computes prompts, the other continues them."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.two_legs import FIRST_LEG as LEG
from tests.server.demo_server import Demo, transferring

pytestmark = pytest.mark.slow
WORDS = "Sort these numbers from the smallest to the largest: "
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture(scope="module", params=[False, True], ids=["", "early"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Demo, Demo]]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("two servers have this key\n")
    prefill = transferring(key, "kv_producer", answer_early=request.param)
    decode = transferring(key, "kv_consumer")
    yield prefill, decode
    prefill.close()
    decode.close()


def post(server: Demo, path: str, body: dict[str, Any], id: str) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-request-id": id},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def route(prefill: Demo, decode: Demo, path: str, body: dict[str, Any], id: str) -> dict[str, Any]:
    """What a router does with a client's request."""
    leg = body | {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": LEG}
    answer = post(prefill, path, leg, id)
    return post(decode, path, body | {"kv_transfer_params": answer["kv_transfer_params"]}, id)


def ask(path: str, text: str) -> dict[str, Any]:
    shared = {"model": "demo", "temperature": 0, "max_tokens": 24}
    if path == PATHS[1]:
        return shared | {"prompt": text}
    return shared | {"messages": [{"role": "user", "content": text}]}


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize("path", PATHS)
def test_two_legs_give_the_answer_of_one_server(pair, path):
    prefill, decode = pair
    for number in range(3):
        body = ask(path, WORDS + ", ".join(str((7 * i + number) % 50) for i in range(30)))
        whole = post(prefill, path, body, "whole")
        routed = route(prefill, decode, path, body, f"request-{number}")
        assert routed["choices"] == whole["choices"]
        prompt = whole["usage"]["prompt_tokens"]
        assert cached(routed) == (prompt - 1) // 16 * 16, "whole pages but that of the last token"


def test_a_first_leg_has_its_token_unless_it_is_answered_early(pair, request):
    early = "early" in request.node.callspec.id
    leg = ask(PATHS[1], WORDS + "5, 3") | {"max_tokens": 1, "kv_transfer_params": LEG}
    for id in ("x", "x"):  # the same one, whose prompt may still be computed
        answer = post(pair[0], PATHS[1], leg, id)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert (answer["choices"][0]["text"] == "") is early
        assert answer["usage"]["completion_tokens"] == (0 if early else 1)
        assert answer["usage"]["prompt_tokens"] > 0


def test_a_prefill_server_that_is_killed_costs_recomputation_and_no_request(pair):
    prefill, decode = pair
    body = ask(PATHS[1], WORDS + ", ".join(str(i * i % 60) for i in range(30)))
    whole = post(prefill, PATHS[1], body, "whole")
    leg = body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": LEG}
    offer = post(prefill, PATHS[1], leg, "x")["kv_transfer_params"]
    os.kill(prefill.process.pid, signal.SIGKILL)
    prefill.process.wait(60)
    # Its engine ends with it; until then it may still answer, which is as good
    routed = post(decode, PATHS[1], body | {"kv_transfer_params": offer}, "x")
    assert routed["choices"] == whole["choices"]
    assert post(decode, PATHS[1], body, "y")["choices"] == whole["choices"]
