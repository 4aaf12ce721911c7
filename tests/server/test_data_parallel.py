"""Several engines of one model behind one server: --data-parallel-size."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.tokenizer import Tokenizer
from tests.server.caching import SEATS, Several
from tests.server.harness import with_settings

COMPLETIONS = "/v1/completions"
TURNS, USERS = 5, 12


def complete(server: Several, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": prompt} | options
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(97, 123), k=length)


def converse(server: Several, user: int) -> list[str]:
    """A conversation whose every turn holds those before; all begin alike."""
    history, answers = prompt_of(64, seed=-1), []
    for turn in range(TURNS):
        history += prompt_of(40, seed=100 * user + turn)
        answers.append(complete(server, history, max_tokens=8)["text"])
        history += prompt_of(8, seed=100 * user + turn + 50)
    return answers


def talk(tokenizer: Tokenizer, engines: int) -> tuple[list[list[str]], Several]:
    """The answers of all users' conversations, which run side by side.

    All have asked before the first is answered, and engines' steps take most of the time: else a
    busy machine would decide how many begin where the first one did, and move them as it stalls.
    """
    with Several(tokenizer, engines, seconds=0.015) as server, ThreadPoolExecutor(USERS) as pool:
        server.control.go.clear()
        try:
            talks = [pool.submit(converse, server, user) for user in range(USERS)]
            while server.get("/load").json()["server_load"] < USERS:
                wait(talks, timeout=0.01, return_when=FIRST_EXCEPTION)
                assert not any(each.done() for each in talks)
        finally:
            server.control.go.set()
        return [each.result() for each in talks], server


def hit_rate(server: Several) -> float:
    return sum(e.index.hits for e in server.made) / sum(e.index.queries for e in server.made)


def test_two_engines_answer_as_one_and_find_nine_tenths_of_its_prefixes(
    tokenizer: Tokenizer,
) -> None:
    alone, one = talk(tokenizer, 1)
    together, two = talk(tokenizer, 2)
    assert together == alone
    assert hit_rate(one) > 0.5
    assert hit_rate(two) >= 0.9 * hit_rate(one)
    assert min(len(engine.requests) for engine in two.made) >= TURNS * USERS // 4


def steps_for(tokenizer: Tokenizer, engines: int) -> int:
    """Steps of the engine that needs the most, for prompts that come at once. A step takes so long
    that prompts which are on their way miss few of them."""
    prompts = [prompt_of(20, seed) for seed in range(8 * SEATS)]
    body = {"model": "fake", "prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    with Several(tokenizer, engines, seconds=0.005) as server:
        assert server.post(COMPLETIONS, body).status == 200
        return max(engine.stats().steps for engine in server.made)


def test_two_engines_need_half_the_steps_of_one(tokenizer: Tokenizer) -> None:
    assert steps_for(tokenizer, 1) >= 1.8 * steps_for(tokenizer, 2)


BODY = {"model": "fake", "prompt": "abc", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def two(tokenizer: Tokenizer) -> Iterator[Several]:
    with Several(tokenizer, 2) as server:
        yield server


def test_requests_without_a_common_prefix_are_spread(two: Several) -> None:
    for number in range(6):  # one after the other: nothing is in flight
        complete(two, prompt_of(40, number), max_tokens=1)
    assert [len(engine.requests) for engine in two.made] == [3, 3]


def test_prompts_of_one_request_run_in_several_engines_and_end_together(two: Several) -> None:
    body = BODY | {"prompt": ["ab", "cd", "ef", "gh"], "max_tokens": 250}
    with two.begin(COMPLETIONS, body | {"stream": True}) as stream:
        assert stream.status() == 200
        assert two.control.saw(lambda: len(two.control.added) == 4)
        two.control.go.clear()
    two.control.go.set()  # the client has gone
    assert two.control.saw(lambda: not two.control.running)
    assert [len(engine.requests) for engine in two.made] == [2, 2]


def test_metrics_and_health_are_told_of_each_engine(two: Several) -> None:
    for number in range(4):
        complete(two, prompt_of(20, number), max_tokens=2)
    families = text_string_to_metric_families(two.get("/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["engine"] for sample in samples} == {"0", "1"}
    tokens = {
        sample.labels["engine"]: sample.value
        for sample in samples
        if sample.name == "vllm:prompt_tokens_total"
    }
    assert tokens == {"0": 40, "1": 40}
    health = two.get("/health").json()
    assert [each["status"] for each in health["engines"]] == ["ok", "ok"]
    assert two.get("/server_info").json()["dp_size"] == 2


def test_requests_without_a_seed_get_one_each_so_that_engines_do_not_draw_alike(
    two: Several,
) -> None:
    for seed in (None, None, 7):
        complete(two, [97], max_tokens=1, seed=seed)
    seeds = [request.params.seed for request in two.control.added]
    assert None not in seeds
    assert len(set(seeds)) == 3
    assert seeds[2] == 7


def test_a_reset_reaches_every_engine_and_what_is_known_of_it(
    tokenizer: Tokenizer,
) -> None:
    with Several(tokenizer, 2, settings=with_settings(admin_keys=("boss",))) as server:
        key = {"authorization": "Bearer boss"}
        for number in range(4):
            complete(server, prompt_of(60, number), max_tokens=1)
        clients = server.server_state.client.clients
        assert all(len(client.cached) for client in clients)
        assert server.post("/reset_prefix_cache", None, **key).status == 200
        assert server.control.resets == [False, False]
        for number in range(2):
            complete(server, prompt_of(10, number), max_tokens=1)
        assert [len(client.cached) for client in clients] == [0, 0]
        server.control.busy = True
        assert server.post("/reset_prefix_cache", None, **key).status == 400


def test_a_command_waits_for_an_engine_that_is_restarted_and_for_none_that_is_given_up(
    tokenizer: Tokenizer,
) -> None:
    with Several(tokenizer, 2, settings=with_settings(admin_keys=("boss",))) as server:
        key = {"authorization": "Bearer boss"}
        server.engine_sockets[1].shutdown(socket.SHUT_RDWR)
        while server.get("/health").status == 200:
            pass
        refused = server.post("/sleep", None, **key)
        assert (refused.status, refused.error["code"]) == (503, "engine_down")
        assert server.get("/is_sleeping", **key).json() == {"is_sleeping": False}
        assert complete(server, [97], max_tokens=1)["finish_reason"] == "length"
        server.server_state.client.clients[1].given_up = True
        assert server.post("/sleep", None, **key).status == 200


def test_an_engine_that_is_lost_takes_its_own_streams_alone(two: Several) -> None:
    two.control.go.clear()
    with two.begin(COMPLETIONS, BODY) as first, two.begin(COMPLETIONS, BODY) as second:
        assert two.control.saw(lambda: len(two.control.added) == 2)
        lost = [len(engine.requests) for engine in two.made].index(1)
        two.engine_sockets[lost].shutdown(socket.SHUT_RDWR)
        two.control.go.set()
        answers = [first.answer(), second.answer()]
    assert sorted(answer.status for answer in answers) == [200, 500]
    (error,) = (answer.error for answer in answers if answer.status == 500)
    assert "send the request again" in error["message"]
    assert two.post(COMPLETIONS, BODY).status == two.get("/ready").status == 200
    health = two.get("/health")
    assert (health.status, health.json()["status"]) == (503, "dead")
    assert sorted(each["status"] for each in health.json()["engines"]) == ["dead", "ok"]
    two.engine_sockets[1 - lost].shutdown(socket.SHUT_RDWR)
    while two.get("/ready").status == 200:
        pass
    assert two.post(COMPLETIONS, BODY).error["code"] == "engine_down"


@pytest.mark.slow
def test_two_engines_whose_steps_take_20_ms_give_1_8_times_the_throughput_of_one(
    tokenizer: Tokenizer,
) -> None:
    def seconds(engines: int) -> float:
        prompts = [prompt_of(20, seed) for seed in range(8 * SEATS)]
        body = {"model": "fake", "prompt": prompts, "max_tokens": 10, "ignore_eos": True}
        with Several(tokenizer, engines, seconds=0.02) as server:
            began = time.monotonic()
            assert server.post(COMPLETIONS, body).status == 200
            return time.monotonic() - began

    assert seconds(1) >= 1.8 * seconds(2)
