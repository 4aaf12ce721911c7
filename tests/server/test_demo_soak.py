"""Hundreds of requests of every kind on the real server, whose pool holds a few of them; many
clients leave. Nobody gets other tokens than alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import openai
import pytest

from tests.server.demo_server import Demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS, LEAVE, CLIENTS = 120, 30, 24
POOL = ["--num-gpu-blocks-override", "20", "--max-model-len", "256", "--max-num-seqs", "6"]
WAYS = {
    "recompute": [],
    "swap, priority": [
        "--preemption-mode",
        "swap",
        "--swap-space",
        "0.01",
        "--scheduling-policy",
        "priority",
    ],
    "host tier": ["--kv-offloading-size", "0.01"],
    "8 bits": ["--kv-cache-dtype", "fp8"],
}
WORDS = (
    "the quick brown fox jumps over lazy dog what is 27 + 58 sort these numbers 7 2 9 "
    "capital of France hello".split()
)


def requests(rng: random.Random, ranked: bool) -> list[dict[str, Any]]:
    """Prompts share openings; some ask for several choices, a search, log-probabilities of the
    prompt or a cache of their own."""
    openings = [" ".join(rng.choices(WORDS, k=30)) for _ in range(3)]
    made = []
    for seed in range(REQUESTS):
        prompt = (
            rng.choice(openings)[: rng.randrange(1, 150)]
            + " "
            + " ".join(rng.choices(WORDS, k=rng.randrange(1, 15)))
        )
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice((0, 1.0, 1.3)),
        }
        extra: dict[str, Any] = {
            "ignore_eos": rng.random() < 0.6,
            "priority": rng.choice((0, 0, -5, 9)) if ranked else 0,
        }
        kind = rng.random()
        if kind < 0.15:
            body["n"] = rng.choice((2, 3, 4))
        elif kind < 0.22:
            body |= {"n": 2, "temperature": 0}
            extra = {"use_beam_search": True, "best_of": 3}
        elif kind < 0.28:
            extra["prompt_logprobs"] = 1
        elif kind < 0.4:
            extra["cache_salt"] = rng.choice("ab")
        made.append(
            {
                "model": "demo",
                "seed": None if "use_beam_search" in extra else seed,
                **body,
                "extra_body": extra,
            }
        )
    return made


async def answer(client: openai.AsyncOpenAI, body: dict[str, Any]) -> list[str]:
    """The texts of all choices."""
    reply = await client.completions.create(**body)
    return [choice.text for choice in reply.choices]


async def leave(client: openai.AsyncOpenAI, body: dict[str, Any], patience: float | int) -> None:
    """Go away, after so many events of a stream, or after so many seconds in the midst of a
    reply."""
    if isinstance(patience, float):
        try:
            await client.completions.create(**body, timeout=patience)
        except openai.APITimeoutError:
            return
        return
    async with await client.completions.create(**body, stream=True) as stream:
        async for _ in stream:
            patience -= 1
            if patience < 0:
                return


async def crowd(
    demo: Demo, bodies: list[dict[str, Any]], rng: random.Random
) -> dict[int, list[str]]:
    """What each of those who stayed got."""
    found: dict[int, list[str]] = {}
    line = iter(enumerate(bodies))
    events = {
        i
        for i, body in enumerate(bodies)
        if body["extra_body"].keys() <= {"ignore_eos", "priority", "cache_salt"}
    }
    patience = {
        i: rng.choice((0.02, 0.1, 0.4, rng.randrange(20) if i in events else 1.0))
        for i in rng.sample(range(REQUESTS), LEAVE)
    }

    async def client() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{demo.url}/v1", api_key="none", max_retries=0
        ) as one:
            for i, body in line:
                if i in patience:
                    await leave(one, body, patience[i])
                else:
                    found[i] = await answer(one, body)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_on_a_tiny_pool_gets_what_each_gets_alone_and_leaves_nothing(way: str) -> None:
    rng = random.Random(way)
    bodies, demo = requests(rng, "priority" in way), Demo(*POOL, *WAYS[way])
    try:
        found = asyncio.run(crowd(demo, bodies, rng))
        assert len(found) == REQUESTS - LEAVE
        with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
            for i, texts in found.items():
                assert [
                    choice.text for choice in client.completions.create(**bodies[i]).choices
                ] == texts, bodies[i]
        deadline = time.monotonic() + 120
        while not demo.metric("jaxllm:self_checks_total") and time.monotonic() < deadline:
            pass  # every look is a round trip
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert demo.metric(f"vllm:{name}") == 0
        assert demo.metric("vllm:prefix_cache_hits_total") > 0
        assert demo.metric("vllm:num_preemptions_total") > 0 or way == "8 bits"
        assert (
            demo.metric("jaxllm:self_checks_total")
            > 0
            == demo.metric("jaxllm:self_check_failures_total")
        )
        assert demo.metric("jaxllm:compiles_after_warmup_total") == 0
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()
