"""How a model lies on its devices, and the limits of its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup import budget
from jaxllm.engine.startup.limits import step_limits
from jaxllm.models import make_spec
from tests.engine.conftest import TINY
from tests.engine.startup.decisions import decide
from tests.weights.packed import write
from tests.weights.test_grouped import pair


def test_packed_weights_count_as_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, settings = pair("llama-gqa", "gptq of 8 bits")
    packed = write(tmp_path / "a", made.config | {"quantization_config": settings}, made.packed)
    plain = write(tmp_path / "b", made.config, made.plain)
    config = EngineConfig(dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=64)
    # This format is held as it is and takes less; it stands for those that are not
    monkeypatch.setattr("jaxllm.weights.weight_formats", lambda *given: {})
    found, expected = (decide(config, path).memory.budget for path in (packed, plain))
    assert found.weights == expected.weights == 2 * sum(x.size for x in made.plain.values())
    (packed / "model.safetensors").unlink()  # nothing is read before memory is refused
    monkeypatch.setattr(budget, "usable_bytes", lambda *given: found.weights - 1)
    message = r"is lacking for the rest .* weights unpacked from gptq: 8 bits .*helps"
    with pytest.raises(ConfigError, match=message):
        decide(config, packed)


@pytest.mark.parametrize(
    ("role", "platform", "tokens"),
    [
        (None, "gpu", 8192),
        ("kv_both", "gpu", 8192),
        ("kv_producer", "gpu", 2048),
        ("kv_producer", "cpu", 512),
    ],
)
def test_steps_of_who_sends_pages_are_short(role: str | None, platform: str, tokens: int) -> None:
    """Pages of a step travel while the next one runs."""
    transfer = None if role is None else {"kv_role": role}
    config = EngineConfig(max_model_len=16384, kv_transfer_config=transfer)
    spec = make_spec(TINY | {"max_position_embeddings": 16384})
    assert step_limits(config, spec, platform).max_num_batched_tokens == tokens
    wish = replace(config, max_num_batched_tokens=4096)
    assert step_limits(wish, spec, platform).max_num_batched_tokens == 4096
