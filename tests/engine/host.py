"""One host of an engine, in a process of its own: `python -m tests.engine.host JSON`, with the
configuration in the JSON. The controller prints what it generates, a line of JSON for each round;
a line on its standard input begins one, and FAIL ends it as a failure does."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import jax

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.follow import follow
from jaxllm.engine.load import load_engine
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import run
from tests.engine.few_shapes import few_shapes

FAIL = "fail"
PROMPTS = [[3 + at, 1] * (4 + 3 * at) for at in range(4)]
# So few pages that requests are swapped
WISHES: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 16,
    "preemption_mode": "swap",
    "swap_space": 0.001,
    "enforce_eager": True,
}


def generate(engine: Engine) -> list[Any]:
    """Tokens of greedy, random and penalised requests, before and after sleep; and how many pages
    were swapped, if any."""
    greedy = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    random = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0.9, seed=4, top_p=0.9, frequency_penalty=0.5
    )
    found: list[Any] = [run(engine, PROMPTS, params) for params in (greedy, random)]
    swapped = engine.runner.traffic.loaded > 0
    for level in (1, 2):
        engine.sleeper.sleep(level)
        engine.sleeper.wake_up()
        found.append(run(engine, PROMPTS, greedy))
    return [*found, swapped]


def main() -> None:
    """Lead or follow."""
    config = EngineConfig(**WISHES | json.loads(sys.argv[1]))
    devices = config.tensor_parallel_size * config.pipeline_parallel_size // config.nnodes
    jax.config.update("jax_num_cpu_devices", devices)
    try:
        with few_shapes():
            if config.node_rank:
                return follow(config)
            engine = load_engine(config)
            assert isinstance(engine, Engine)
            for line in sys.stdin:
                if line.strip() == FAIL:
                    sys.exit(1)
                try:
                    print(json.dumps(generate(engine)), flush=True)
                except (ValueError, RuntimeError):
                    # Devices may notice before the group does that a host has gone
                    threading.Event().wait(60)
                    raise
                late = engine.runner.compiles.since_start
                assert config.enforce_eager or not late, f"{late} programs were compiled late"
            engine.runner.leave()
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
