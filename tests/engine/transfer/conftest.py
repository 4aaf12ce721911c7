"""Two engines, one of which computes prompts that the other continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.kv_transfer import ring
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = [(7 * i) % 90 + 1 for i in range(61)]  # seven whole pages of 8, and 5 tokens
PREFILL = SamplingParams(temperature=0, max_tokens=1, min_tokens=1)
DECODE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("a key of two engines")
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def two_slots() -> Iterator[None]:
    """Each page takes the memory of the one before the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SIZE", 1)
        yield


@pytest.fixture(scope="module")
def make(make_engine: MakeEngine, key_file: str) -> MakeEngine:
    def make(
        role: str,
        seconds: float = 20.0,
        buffer: int = 1 << 22,
        early: bool = False,
        **overrides: Any,
    ) -> Engine:
        extra = {"key_file": key_file, "timeout_seconds": seconds, "answer_early": early}
        config = {"kv_role": role, "kv_port": 0, "kv_buffer_size": buffer}
        config |= {"kv_connector_extra_config": extra}
        return make_engine(kv_transfer_config=config, **{"kv_offloading_size": 0.001} | overrides)

    return make


@pytest.fixture(scope="module")
def prefill(make: MakeEngine) -> Iterator[Engine]:
    yield (engine := make("kv_producer"))
    close(engine)


@pytest.fixture(scope="module")
def decode(make: MakeEngine) -> Iterator[Engine]:
    yield (engine := make("kv_consumer"))
    close(engine)


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> list[int]:
    """Tokens of one engine without transfers."""
    engine = make_engine(num_gpu_blocks_override=40)
    return tokens_of(collect(engine, [request(PROMPT)]), "r")


def close(engine: Engine) -> None:
    assert engine.transfer is not None
    engine.transfer.close()


def request(prompt: list[int], **more: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt=Prompt(prompt), **({"params": DECODE} | more))


def share(engine: Engine, prompt: list[int], **more: Any) -> dict[str, Any]:
    """The prefill leg."""
    collect(engine, [request(prompt, params=PREFILL, shares_pages=True, **more)])
    engine.scheduler.check()
    assert engine.resolved.page_offer is not None
    return engine.resolved.page_offer


def continued(engine: Engine, prompt: list[int], offer: dict[str, Any], **more: Any) -> TextDelta:
    """The last delta of the decode leg, with all its tokens; the engine's prefix cache is empty
    before."""
    engine.reset_prefix_cache()
    deltas = collect(engine, [request(prompt, page_offer=offer, **more)])
    engine.scheduler.check()
    deltas[-1].token_ids = tokens_of(deltas, "r")
    return deltas[-1]
