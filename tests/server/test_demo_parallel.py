"""Two engines of the built-in model behind one server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.demo_server import Demo

USERS, TURNS = 6, 4
EAGER = ("--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")


def talk(*flags: str) -> tuple[list[list[str]], float]:
    """The answers of conversations side by side, and the share of prompts that was cached."""
    server = Demo(*EAGER, *flags)
    usages: list[Any] = []
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

            def converse(user: int) -> list[str]:
                messages: list[Any] = []
                for turn in range(TURNS):
                    numbers = ", ".join(
                        str((user * 37 + turn * 11 + i * 7) % 100) for i in range(9)
                    )
                    messages.append({"role": "user", "content": f"sort {numbers}"})
                    reply = client.chat.completions.create(
                        model="demo", messages=messages, max_tokens=24, temperature=0
                    )
                    usages.append(reply.usage)
                    answer = reply.choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": answer})
                return [each["content"] for each in messages[1::2]]

            with ThreadPoolExecutor(USERS) as pool:
                answers = list(pool.map(converse, range(USERS)))
    finally:
        status = server.stop()
    assert status == 0, server.log
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    return answers, cached / sum(usage.prompt_tokens for usage in usages)


@pytest.mark.slow
def test_two_engines_of_a_model_answer_as_one_and_find_its_prefixes() -> None:
    alone, found_alone = talk()
    together, found_together = talk("--data-parallel-size", "2")
    assert together == alone
    assert found_alone > 0.4
    assert found_together >= 0.9 * found_alone


def vectors(*flags: str) -> tuple[list[list[float]], set[str]]:
    """Embeddings of texts, asked for one by one and at once, and the engines that gave some."""
    server = Demo(*EAGER, "--runner", "pooling", *flags)
    texts = [f"sort {n}, {n * 7 % 100}, {n * 31 % 100}" for n in range(12)]
    try:
        found = [server.ask("/v1/embeddings", {"input": text})["data"] for text in texts[:4]]
        found.append(server.ask("/v1/embeddings", {"input": texts[4:]})["data"])
        name = "vllm:prompt_tokens_total{"
        worked = {
            line.partition('engine="')[2][0]
            for line in server.scrape()
            if line.startswith(name) and float(line.rpartition(" ")[2]) > 0
        }
    finally:
        status = server.stop()
    assert status == 0, server.log
    return [each["embedding"] for data in found for each in data], worked


@pytest.mark.slow
def test_two_engines_of_a_pooling_model_give_the_vectors_of_one() -> None:
    alone, _ = vectors()
    together, worked = vectors("--data-parallel-size", "2")
    assert worked == {"0", "1"}
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=1e-4)
