"""Where the time of decode steps goes: traces steps of a full batch with JAX's profiler and prints
the kernels that take longest.

    python -m benchmarks.profile --model shape:qwen2.5-7b --batch-size 64 --input-len 1024
    python -m benchmarks.profile --model shape:qwen2.5-7b --batch-size 1 --input-len 8192 --prefill

With --prefill the steps that compute the prompts are traced instead. Recorded command buffers are
not replayed under the profiler, so the sum over kernels is the figure to read, not the wall time;
that of decode steps is taken before, without the profiler, beside the processor's time of this
process. With --few only the batch's programs are compiled, and not the smaller shapes that an
engine has besides.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from jaxllm import LLM, SamplingParams
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt

# Events of the CPU runtime that are marks, or waits for work
SYNTHETIC = ("ThreadpoolListener::", "ThunkExecutor::", "SlinkyThreadPool::", "end: ")


class Event(NamedTuple):
    """A kernel that ran once, in seconds of the trace."""

    start: float
    end: float
    name: str


class Kernel(NamedTuple):
    """A kernel's share of a trace."""

    name: str
    calls: int
    seconds: float


def events(directory: str | Path) -> list[Event]:
    """Kernels in the newest trace of a directory as they began; on CPU, the operations of XLA's
    threads."""
    runs = sorted(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = jax.profiler.ProfileData.from_file(str(runs[-1])).planes if runs else ()
    return sorted(
        Event(event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9, event.name)
        for plane in planes
        for line in plane.lines
        if line.name.startswith(("Stream", "XLA Ops", "tf_XLA"))
        for event in line.events
        if event.duration_ns and not event.name.startswith(SYNTHETIC)
    )


def kernels(found: list[Event]) -> list[Kernel]:
    """What ran, longest in sum first."""
    return summed((event.name, event.end - event.start) for event in found)


def pauses(found: list[Event]) -> list[Kernel]:
    """After which kernels nothing ran, how often and for how long in sum, longest first."""
    times: list[tuple[str, float]] = []
    last = found[0] if found else Event(0.0, 0.0, "")
    for event in found:
        if event.start > last.end:
            times.append((last.name, event.start - last.end))
        last = max(last, event, key=lambda each: each.end)
    return summed(times)


def summed(given: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Seconds by name, longest in sum first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, seconds in given:
        times[name].append(seconds)
    totals = [Kernel(name, len(each), sum(each)) for name, each in times.items()]
    return sorted(totals, key=lambda kernel: -kernel.seconds)


def submit(llm: LLM, a: argparse.Namespace, tag: str) -> list[str]:
    """Queue a batch of fresh random prompts; returns the ids of the requests."""
    rng, engine = random.Random(f"{a.seed} {tag}"), llm.engine
    params = SamplingParams(
        temperature=a.temperature,
        # None ends while the prompts of others are computed
        max_tokens=a.steps + a.warm_up + 8 + a.batch_size,
        ignore_eos=True,
        detokenize=False,
    )
    ids = [f"{tag}-{n}" for n in range(a.batch_size)]
    for id in ids:
        prompt = [rng.randrange(engine.resolved.vocab_size) for _ in range(a.input_len)]
        engine.add(GenerateRequest(id=id, prompt=Prompt(prompt), params=params))
    return ids


def until_decoding(llm: LLM, ids: list[str]) -> int:
    """Turn the engine until every request has a token; returns the number of turns."""
    waiting, turns = set(ids), 0
    while waiting:
        waiting -= {delta.id for delta in llm.engine.step() if delta.token_ids}
        turns += 1
    return turns


def warm_up(llm: LLM, a: argparse.Namespace, ids: list[str]) -> None:
    """Compute the batch's prompts, and some decode steps."""
    until_decoding(llm, ids)
    for _ in range(a.warm_up):
        llm.engine.step()


def timed(llm: LLM, a: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a decode step of one batch, of which the processor works some."""
    ids = submit(llm, a, "timed")
    warm_up(llm, a, ids)
    start, worked = time.perf_counter(), time.process_time()
    for _ in range(a.steps):
        llm.engine.step()
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    drain(llm, ids)
    return {
        "ms_per_step": round(seconds / a.steps * 1e3, 4),
        "processor_ms_per_step": round(worked / a.steps * 1e3, 4),
    }


def few() -> None:
    """Have engines of this process compile the largest shapes alone."""
    build = Buckets.build

    def largest(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
        usual = build(max_num_seqs, max_num_batched_tokens, platform)
        widest = max(usual.extend, key=lambda shape: (shape.decodes, shape.tokens))
        extend = tuple(sorted({usual.extend[-1], widest}))
        rows = {usual.decode[-1], *(shape.decodes + shape.chunks for shape in extend)}
        return replace(usual, decode=usual.decode[-1:], extend=extend, logits=tuple(sorted(rows)))

    Buckets.build = largest  # type: ignore[method-assign]


def trace(llm: LLM, a: argparse.Namespace) -> tuple[int, float]:
    """Trace the prefill or `--steps` decode steps of one batch; returns how many turns of the
    engine it was and their seconds."""
    ids = submit(llm, a, "traced")
    turns = a.steps
    if not a.prefill:
        warm_up(llm, a, ids)
    llm.start_profile()
    start = time.perf_counter()
    if a.prefill:
        turns = until_decoding(llm, ids)
    else:
        for _ in range(turns):
            llm.engine.step()
    seconds = time.perf_counter() - start
    llm.stop_profile()
    drain(llm, ids)
    return turns, seconds


def drain(llm: LLM, ids: list[str]) -> None:
    """Forget the batch."""
    for id in ids:
        llm.engine.abort(id)
    while llm.engine.has_work:
        llm.engine.step()


def table(found: list[Kernel], turns: int, top: int) -> str:
    """The `top` kernels: milliseconds a turn, share, calls a turn, name."""
    whole = sum(kernel.seconds for kernel in found) or 1.0
    lines = [f"{'ms a step':>10} {'share':>6} {'calls':>7}  kernel"]
    lines += [
        f"{k.seconds / turns * 1e3:>10.4f} {k.seconds / whole:>6.1%} {k.calls / turns:>7.1f}  "
        f"{k.name[:100]}"
        for k in found[:top]
    ]
    calls = sum(kernel.calls for kernel in found) / turns
    return "\n".join([*lines, f"{whole / turns * 1e3:>10.4f} {'100%':>6} {calls:>7.1f}  all"])


def main() -> None:
    """Trace and print."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--batch-size", type=int, default=8)
    args.add_argument("--input-len", type=int, default=128)
    args.add_argument("--steps", type=int, default=16, help="steps that are traced")
    args.add_argument("--warm-up", type=int, default=8, help="decode steps before the trace")
    args.add_argument("--temperature", type=float, default=0.0)
    args.add_argument("--prefill", action="store_true", help="trace the prompts' steps instead")
    args.add_argument("--max-model-len", type=int)
    args.add_argument("--quantization", help="what weights are rounded to, such as fp8")
    args.add_argument("--options", type=json.loads, default={}, help="JSON: others of LLM")
    args.add_argument("--few", action="store_true", help="compile the largest shapes alone")
    args.add_argument("--top", type=int, default=25, help="kernels to print")
    args.add_argument(
        "--profiler-dir", help="keep the trace here, for XProf, TensorBoard or Perfetto"
    )
    a = args.parse_args()
    if a.few:
        few()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "profiler_dir": a.profiler_dir or folder,
            "max_num_seqs": a.batch_size,
            "max_model_len": a.max_model_len,
            "quantization": a.quantization,
        }
        options |= {"enable_prefix_caching": False} | a.options
        llm = LLM(**engine_options(a.model) | options)
        untraced = timed(llm, a)
        turns, seconds = trace(llm, a)
        ran = events(options["profiler_dir"])
    found, idle = kernels(ran), pauses(ran)
    print(table(found, turns, a.top))
    print("without a kernel, after:")
    print(table(idle, turns, a.top // 4))
    print("untraced:", untraced)
    rows = [
        {"kernel": k.name, "calls": k.calls, "ms": round(k.seconds * 1e3, 4)}
        for k in found[: a.top]
    ]
    whole = round(sum(k.seconds for k in found) / turns * 1e3, 4)
    finish(
        "profile",
        a,
        {
            "steps": turns,
            "wall_ms_per_step": round(seconds / turns * 1e3, 4),
            "kernel_ms_per_step": whole,
            "idle_ms_per_step": round(sum(k.seconds for k in idle) / turns * 1e3, 4),
            "untraced": untraced,
            "kernels": rows,
        },
    )


if __name__ == "__main__":
    main()
