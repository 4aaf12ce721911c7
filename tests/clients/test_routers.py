"""Replicas behind the routers that people use, which know nothing of jaxllm."""

from __future__ import annotations

import json
import pathlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import openai
import pytest

from tests.clients.environments import need
from tests.clients.routers import (
    IN_LEGS,
    PRODUCTION_STACK,
    ROUTERS,
    SESSION,
    Gateway,
    Replica,
    Router,
    free_port,
    started,
)
from tests.server.demo_server import Demo, transferring

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

QUESTIONS = [f"What is {a} + {b}?" for a in (27, 58, 13) for b in (31, 64)]
WORDS = "sort add list tools weather number please compute write answer quick brown fox".split()
USERS, TURNS = 6, 4
STEP, ROWS, LENGTH = 0.02, 8, 60  # of the paced engine: seconds, rows and tokens of an answer

EACH = [(router, policy) for router in ROUTERS for policy in router.policies]
BY_PREFIX = [(router, policy) for router, policy in EACH if policy.endswith("aware")]
BY_SESSION = [(router, policy) for router, policy in EACH if policy == "session"]
IN_TURN = [(router, policy) for router, policy in EACH if policy in ("round_robin", "roundrobin")]
ATTEMPTS = 3  # at a time: whatever else the machine does makes it longer, never shorter


def named(value: Any) -> str:
    """The id of a case."""
    return value.name if isinstance(value, Router) else str(value)


class Paced(Demo):
    """A server whose engine gives each of ROWS streams a token every STEP, and twice as many
    streams half of that."""

    module = ("benchmarks.paced_engine", "serve")


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where routers are installed, once for all tests."""
    need("pip", "index", "versions", "openai")
    return tmp_path_factory.mktemp("venvs")


@pytest.fixture(scope="module")
def demos() -> Iterator[list[Demo]]:
    """Two replicas of the demo model that publish KV events."""
    started: list[Demo] = []
    try:
        for _ in range(2):
            events = {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://127.0.0.1:{free_port()}",
                "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
            }
            demo = Demo("--kv-events-config", json.dumps(events), "--block-size", "16")
            demo.events = events  # type: ignore[attr-defined]
            started.append(demo)
        yield started
    finally:
        for demo in started:
            demo.close()


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Demo]]:
    """Two replicas whose steps take STEP."""
    plan = {"streams": 1, "rate": ROWS / STEP, "tokens": ["a"] * LENGTH, "turns": 1, "turn": 0}
    monkeypatch.setenv("PACED", json.dumps(plan))
    both = [Paced(), Paced()]
    yield both
    for one in both:
        one.close()


def replicas(demos: list[Demo]) -> list[Replica]:
    """What routers are told of servers."""
    events = [getattr(demo, "events", {"endpoint": "", "replay_endpoint": ""}) for demo in demos]
    return [
        Replica(demo.url, one["endpoint"], one["replay_endpoint"])
        for demo, one in zip(demos, events, strict=True)
    ]


@contextmanager
def client_of(place: Gateway | Demo) -> Iterator[openai.OpenAI]:
    """A client that sends each request once."""
    key = place.key if isinstance(place, Gateway) else "none"
    url = f"{place.url}/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any, stream: bool = False) -> str:
    """A greedy answer."""
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 12}
    if not stream:
        reply = client.chat.completions.create(**asked, temperature=0)
        return reply.choices[0].message.content or ""
    chunks = client.chat.completions.create(**asked, temperature=0, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def finished(demos: list[Demo]) -> list[float]:
    """Prompt tokens that each replica has looked up so far."""
    return [demo.metric("vllm:prefix_cache_queries_total") for demo in demos]


@pytest.mark.parametrize(("router", "policy"), EACH, ids=named)
def test_answers_are_those_of_a_replica(
    router: Router, policy: str, demos: list[Demo], venvs: pathlib.Path
) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with client_of(demos[0]) as client:
        direct = [ask(client, chat) for chat in chats]
    before = finished(demos)
    with (
        started(router, policy, replicas(demos), venvs) as gateway,
        client_of(gateway) as client,
    ):
        for stream in (False, True):
            assert [ask(client, chat, stream) for chat in chats] == direct
    after = finished(demos)
    served = [new - old for new, old in zip(after, before, strict=True)]
    assert sum(served) > 0
    if not policy.endswith("aware"):
        assert all(served), "each replica has its share"


@pytest.mark.parametrize(("router", "policy"), BY_SESSION, ids=named)
def test_a_session_stays_with_its_replica(
    router: Router, policy: str, demos: list[Demo], venvs: pathlib.Path
) -> None:
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    places = []
    with started(router, policy, replicas(demos), venvs) as gateway:
        for user in range(8):
            before = finished(demos)
            with client_of(gateway) as client:
                for _ in range(3):
                    ask(client.with_options(default_headers={SESSION: f"user {user}"}), chat)
            served = [new > old for new, old in zip(finished(demos), before, strict=True)]
            assert served.count(True) == 1, "one replica has all of a session"
            places.append(served.index(True))
    assert set(places) == {0, 1}, "and each replica has some"


def test_one_replica_computes_prompts_and_another_continues_them(
    venvs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    key = tmp_path / "key"
    key.write_text("two servers have this key\n")
    legs: list[Demo] = []
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
    asked["prompt"] = "Sort these numbers: " + ", ".join(map(str, range(40)))
    try:
        for role in ("kv_producer", "kv_consumer"):
            legs.append(transferring(key, role))
        with (
            started(PRODUCTION_STACK, IN_LEGS, replicas(legs), venvs) as gateway,
            client_of(gateway) as client,
            client_of(legs[0]) as direct,
        ):
            routed = client.completions.create(**asked)
            whole = direct.completions.create(**asked)
            chunks = [*client.completions.create(**asked, stream=True)]
    finally:
        for leg in legs:
            leg.close()
    assert routed.choices[0].text == whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert routed.usage is not None and routed.usage.prompt_tokens_details is not None
    cached = routed.usage.prompt_tokens_details.cached_tokens
    assert cached == (routed.usage.prompt_tokens - 1) // 16 * 16, "all whole pages but the last"


class Conversation:
    """A user's side of a conversation; the texts follow from the seed."""

    def __init__(self, seed: str):
        self.draw = random.Random(seed)
        self.messages = [{"role": "user", "content": self.words(40)}]

    def words(self, count: int) -> str:
        return " ".join(self.draw.choices(WORDS, k=count))

    def go_on(self, client: openai.OpenAI, turns: int) -> None:
        """Hear an answer and say the next thing, so many times."""
        for _ in range(turns):
            answer = ask(client, self.messages)
            self.messages.append({"role": "assistant", "content": answer or "yes"})
            self.messages.append({"role": "user", "content": self.words(8)})


def conversations(client: openai.OpenAI, seed: str, at_once: int) -> None:
    """USERS begin together; then so many at once go on, until all have had TURNS turns."""
    users = [Conversation(f"{seed} {user}") for user in range(USERS)]
    for threads, turns in ((USERS, 1), (at_once, TURNS - 1)):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(Conversation.go_on, users, repeat(client), repeat(turns)))


def hit_rate(demos: list[Demo], client: openai.OpenAI, seed: str, at_once: int) -> float:
    """The share of prompt tokens found in the caches of these replicas, over conversations."""
    names = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"

    def counts() -> list[float]:
        return [sum(demo.metric(name) for demo in demos) for name in names]

    before = counts()
    conversations(client, seed, at_once)
    hits, queries = (new - old for new, old in zip(counts(), before, strict=True))
    return hits / queries


@pytest.mark.parametrize(("router", "policy"), BY_PREFIX, ids=named)
def test_two_replicas_find_as_much_as_one(
    router: Router, policy: str, demos: list[Demo], venvs: pathlib.Path
) -> None:
    # This policy multiplies what is left to compute by the requests in flight: a user whose replica
    # has more of them than the other is sent away from the cache, oftener on a slower machine
    at_once = 1 if policy == "kv_aware" else USERS
    with client_of(demos[0]) as client:
        alone = hit_rate(demos[:1], client, f"alone {router.name} {policy}", at_once)
    with (
        started(router, policy, replicas(demos), venvs) as gateway,
        client_of(gateway) as client,
    ):
        together = hit_rate(demos, client, f"{router.name} {policy}", at_once)
    assert together >= 0.9 * alone > 0.3


def seconds(client: openai.OpenAI, streams: int) -> float:
    """How long so many streams take at once, at best."""
    return min(attempted(client, streams) for _ in range(ATTEMPTS))


def attempted(client: openai.OpenAI, streams: int) -> float:
    """How long so many streams take at once."""
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(lambda _: read(client), range(streams)))
    assert answers == ["a" * LENGTH] * streams
    return time.monotonic() - began


def read(client: openai.OpenAI) -> str:
    """A stream of the paced engine."""
    chunks = client.completions.create(model="demo", prompt="x", max_tokens=LENGTH, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.parametrize(("router", "policy"), IN_TURN, ids=named)
def test_two_replicas_are_nearly_twice_as_fast_as_one(
    router: Router, policy: str, paced: list[Demo], venvs: pathlib.Path
) -> None:
    streams = 4 * ROWS
    found = []
    for behind in (paced[:1], paced):
        with (
            started(router, policy, replicas(behind), venvs) as gateway,
            client_of(gateway) as client,
        ):
            found.append(seconds(client, streams))
    alone, together = found
    assert alone >= 1.8 * together


@pytest.mark.parametrize(("router", "policy"), IN_TURN, ids=named)
def test_a_killed_replica_takes_its_own_streams_alone(
    router: Router, policy: str, paced: list[Demo], venvs: pathlib.Path
) -> None:
    streams = 2 * ROWS
    read_so_far, ends = threading.Semaphore(0), dict[int, str]()

    def follow(client: openai.OpenAI, number: int) -> None:
        text = ""
        try:
            asked = {"model": "demo", "prompt": "x", "max_tokens": LENGTH, "stream": True}
            for chunk in client.completions.create(**asked):  # type: ignore[call-overload]
                text += "".join(choice.text for choice in chunk.choices)
                read_so_far.release()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        ends[number] = text

    with (
        started(router, policy, replicas(paced), venvs) as gateway,
        client_of(gateway) as client,
    ):
        threads = [threading.Thread(target=follow, args=(client, i)) for i in range(streams)]
        for thread in threads:
            thread.start()
        for _ in range(streams * LENGTH // 4):
            assert read_so_far.acquire(timeout=30)
        paced[0].process.kill()
        for thread in threads:
            thread.join(60)
        whole = [text for text in ends.values() if text == "a" * LENGTH]
        assert len(ends) == streams and len(whole) == streams // 2, ends
        # The router may need a failure or two to see it
        answers = [attempt(client) for _ in range(8)]
        assert answers.count("a" * LENGTH) >= 4, answers


def attempt(client: openai.OpenAI) -> str:
    """A stream, or its error."""
    try:
        return read(client)
    except openai.OpenAIError as error:
        return str(error)
