"""A process may make and drop models as long as it lives: what is theirs goes with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

MIB = 2**20
ROUNDS = """
import ctypes, gc, json, os, sys, threading
import jax, psutil
from jaxllm import LLM, SamplingParams

LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
libc = ctypes.CDLL(None)


def one_round():
    llm = LLM("demo", **LIMITS)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    regex = SamplingParams(max_tokens=4, structured_outputs={"regex": "[ab]{9}"})
    llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
    llm.generate([[1, 2, 3]], regex, use_tqdm=False)
    llm.sleep(2)
    llm.wake_up()
    llm.generate([[1, 2, 3]], greedy, use_tqdm=False)


for _ in range(int(sys.argv[1])):
    one_round()
    gc.collect()
    libc.malloc_trim(0)
    process = psutil.Process()
    print(json.dumps({
        "bytes": process.memory_info().rss,
        "arrays": len(jax.live_arrays()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": len(process.children(recursive=True)),
        "files": process.num_fds(),
        "maps": len(process.memory_maps(grouped=False)),
        "objects": len(gc.get_objects()),
    }), flush=True)
"""


def measured(rounds: int) -> list[dict[str, Any]]:
    """What a process has left after each model that it made and dropped."""
    found = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(rounds)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = found.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("rounds", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_models_that_are_made_and_dropped_leave_nothing(rounds: int) -> None:
    _, _, third, *others = measured(rounds)
    assert len(others) == rounds - 3
    for later in others:
        assert later["arrays"] == later["processes"] == 0
        assert later["threads"] == third["threads"] == ["MainThread"]
        assert later["files"] == third["files"]
        assert later["maps"] <= third["maps"] + 50, "no executable stays"
        assert later["bytes"] < third["bytes"] + 8 * MIB
