"""Times what penalties, biases and masks cost on the device at hand: the programs `process_logits`,
`set_slot` and `apply_token_bitmask`.

    python -m benchmarks.process --vocab 152064 --slots 256 --rows 16 64 128 256

One JSON line a program and row count: µs a call, and with --profile the kernels. `predicted_us` is
the bytes of one pass (logits in and out, counts, bits) at --bandwidth. Buffers are donated from
call to call, as the engine does.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import kernel_times
from jaxllm.engine.runtime.programs.process_logits import (
    apply_token_bitmask,
    bitmask_layout,
    process_logits,
    set_slot,
    slot_layout,
)
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    host_columns,
)
from jaxllm.sampling.bits import words_of
from jaxllm.sampling.options import PROCESS_COLUMNS
from jaxllm.sampling.process import LogitsParams

CALLS = 40


def per_call(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median microseconds of one call among many that are queued."""
    for _ in range(4):
        jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(CALLS):
            out = run()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(statistics.median(found), 1)


def made(like: Any, seed: int = 0) -> Any:
    """Arrays of these shapes: random floats, and ids, counts and bits that are legal."""
    rng = np.random.default_rng(seed)

    def one(s: jax.ShapeDtypeStruct) -> jax.Array:
        if s.dtype == jnp.float32:
            return jnp.asarray(rng.standard_normal(s.shape, np.float32) * 3 + 1)
        top = 2**32 if s.dtype == jnp.uint32 else 3 if s.dtype == jnp.uint16 else 1
        return jnp.asarray(rng.integers(0, top, s.shape, np.int64).astype(s.dtype))

    return jax.tree.map(one, like)


def state_of(slots: int) -> SlotState:
    """Every slot alive and asking, with penalties."""
    state = SlotState.zeros(slots, 64)
    host_columns(state.progress, PROGRESS)["alive"][:] = 1
    params = host_columns(state.params, SLOT_PARAMS)
    for name in ("processed", *PROCESS_COLUMNS):
        params[name][:] = 1.5 if name in PROCESS_COLUMNS else 1
    return jax.tree.map(jnp.asarray, state)


def time_process(rows: int, slots: int, vocab: int, profile: bool) -> dict[str, Any]:
    """One call over `rows` rows of logits, all of requests with penalties and a full list of
    biases."""
    terms = made(LogitsParams.shapes(slots, vocab))
    width = terms.bias_ids.shape[1]
    terms = replace(
        terms,
        bias_ids=terms.bias_ids + jnp.arange(width) * (vocab // width),
    )
    logits = made(jax.ShapeDtypeStruct((rows, vocab), jnp.float32))
    forward_output = ForwardOutput(
        logits, jnp.arange(rows, dtype=jnp.int32) % slots, jnp.ones(rows, jnp.bool_)
    )
    counts = made(jax.ShapeDtypeStruct((slots + 1, vocab), jnp.uint16))
    program = jax.jit(
        functools.partial(process_logits, ()), donate_argnums=(2, 4), keep_unused=True
    )
    held = [counts, jnp.zeros_like(logits)]
    state = state_of(slots)

    def run() -> Any:
        held[:] = program(forward_output, state, held[0], terms, held[1])
        return held[1]

    compiled = (
        program.lower(forward_output, state, held[0], terms, held[1]).compile().memory_analysis()
    )
    found = {"us": per_call(run), "temp_MB": round(compiled.temp_size_in_bytes / 1e6, 1)}
    return found | ({"kernels": kernel_times(lambda *_: run(), logits, ())} if profile else {})


def time_upload(kind: str, slots: int, vocab: int) -> dict[str, Any]:
    """One call of `set_slot` or `apply_token_bitmask`, with its buffer in pinned memory where there
    is one."""
    terms = made(LogitsParams.shapes(slots, vocab))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host") if jax.devices()[0].platform == "gpu" else device
    layout = slot_layout(terms) if kind == "set_slot" else bitmask_layout(slots, words_of(vocab))
    buffer = jax.device_put(np.zeros(layout.size, np.int32), host)
    partial = functools.partial(set_slot if kind == "set_slot" else apply_token_bitmask, layout)
    donated = (0, 1) if kind == "set_slot" else 0
    program = jax.jit(functools.partial(partial, device), donate_argnums=donated)
    held: list[Any] = (
        [made(jax.ShapeDtypeStruct((slots + 1, vocab), jnp.uint16)), terms]
        if kind == "set_slot"
        else [terms]
    )

    def run() -> Any:
        *held[:], taken = program(*held, buffer)
        return taken

    return {"us": per_call(run), "bytes": layout.size * 4}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s")
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    for rows in a.rows:
        moved = rows * (a.vocab * (4 + 4 + 2) + 2 * words_of(a.vocab) * 4)
        row = {
            "program": "process_logits",
            "rows": rows,
            "predicted_us": round(moved / a.bandwidth / 1e6, 1),
        }
        print(json.dumps(row | time_process(rows, a.slots, a.vocab, a.profile)), flush=True)
    for kind in ("set_slot", "apply_token_bitmask"):
        print(json.dumps({"program": kind, **time_upload(kind, a.slots, a.vocab)}), flush=True)


if __name__ == "__main__":
    main()
