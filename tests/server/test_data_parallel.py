"""Several engines of one model behind one server: --data-parallel-size."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.tokenizer import Tokenizer
from tests.server.caching import SEATS, Several

COMPLETIONS = "/v1/completions"
TURNS, USERS = 5, 12


def complete(server: Several, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": prompt, "return_token_ids": True} | options
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def converse(server: Several, user: int) -> list[str]:
    """A conversation whose every turn holds those before; all begin alike."""
    history, answers = prompt_of(64, seed=-1), []
    for turn in range(TURNS):
        history += prompt_of(40, seed=100 * user + turn)
        answers.append(complete(server, history, max_tokens=8)["text"])
        history += prompt_of(8, seed=100 * user + turn + 50)
    return answers


def talk(tokenizer: Tokenizer, engines: int) -> tuple[list[list[str]], Several]:
    """The answers of all users' conversations, which run side by side."""
    with Several(tokenizer, engines) as server, ThreadPoolExecutor(USERS) as pool:
        return list(pool.map(lambda user: converse(server, user), range(USERS))), server


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
    """Steps of the engine that needs the most, for prompts that come at once."""
    prompts = [prompt_of(20, seed) for seed in range(8 * SEATS)]
    with Several(tokenizer, engines) as server:
        body = {"model": "fake", "prompt": prompts, "max_tokens": 5, "ignore_eos": True}
        server.control.go.clear()
        with server.begin(COMPLETIONS, body) as under_way:
            assert server.control.saw(lambda: len(server.control.added) == len(prompts))
            server.control.go.set()
            assert under_way.status() == 200
        return max(engine.stats().steps for engine in server.made)


def test_two_engines_need_half_the_steps_of_one(tokenizer: Tokenizer) -> None:
    assert steps_for(tokenizer, 1) >= 1.8 * steps_for(tokenizer, 2)
