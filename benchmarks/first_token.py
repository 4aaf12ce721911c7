"""What the host does for the first token of a prompt that is alone on the engine, in microseconds.

    python -m benchmarks.first_token
    python -m benchmarks.first_token --programs empty --devices 2 --before DIR

Nothing is computed and no GPU is needed: the engine has the shapes and the buffers that it would
have on a GPU, and its programs answer at once (`none`: what is left is Python) or take and give the
same arrays and compute nothing (`empty`: JAX's launches are counted too, as they are on a CPU).
Before each call the processor's caches are emptied, as a GPU's driver and the time between calls do
it; a call that follows another at once takes a third of the time.

Figures are medians: `before` is the time until the first program is launched, `launches` that of
all launches and what lies between them, `after` the time from the tokens' arrival to the return of
`generate`. `--before` is another checkout, which takes turns with this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import finish, host, parser
from benchmarks.shapes import engine_options

HERE = Path(__file__).parents[1]
# Narrow, so that weights take no time; as many arrays as the shape has
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
OPTIONS: dict[str, Any] = {
    "hf_overrides": NARROW,
    "enforce_eager": True,
    "max_model_len": 9216,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "block_size": 64,
    "num_gpu_blocks_override": 512,
}
CACHES = 2**26  # bytes that are read to empty them
WARM = 10  # calls before those that count
FIGURES = "before", "launches", "after", "all"


def main() -> None:
    """Parses the command line and prints the table, or takes figures for another process."""
    own = parser(__doc__)
    own.formatter_class = argparse.RawDescriptionHelpFormatter
    own.set_defaults(model="shape:qwen3-0.6b")
    own.add_argument("--programs", choices=("none", "empty"), default="none")
    own.add_argument("--devices", type=int, default=1, help="over which the model is split")
    own.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens")
    own.add_argument("--calls", type=int, default=40, help="of a prompt and round")
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--prefix-caching", action="store_true")
    own.add_argument("--before", type=Path, help="another checkout to compare with")
    own.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = own.parse_args()
    if a.child:
        answer(a)
        return
    trees = {"now": HERE} if a.before is None else {"now": HERE, "before": a.before.resolve()}
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    with contextlib.ExitStack() as stack:
        ask = {name: stack.enter_context(engine_of(tree)) for name, tree in trees.items()}
        for _ in range(a.rounds):
            for name, prompt in ((name, prompt) for prompt in a.prompts for name in trees):
                found.setdefault(name, {}).setdefault(prompt, []).extend(ask[name](prompt))
    a.before = a.before and "another checkout"
    finish("first-token", a, {name: medians(calls) for name, calls in found.items()}, host())


def medians(calls: dict[int, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each prompt's length, the median of each figure in µs."""
    return {
        str(prompt): {
            name: round(1e6 * statistics.median(call[name] for call in found), 1)
            for name in FIGURES
        }
        for prompt, found in calls.items()
    }


@contextlib.contextmanager
def engine_of(tree: Path) -> Iterator[Callable[[int], list[dict[str, float]]]]:
    """What takes figures of a checkout's engine, in a process of its own: tokens of the prompt to
    a dict for each call."""
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--child"]
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def ask(prompt: int) -> list[dict[str, float]]:
        print(prompt, file=questions, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit("an engine ended before it answered")
        found: list[dict[str, float]] = json.loads(line)
        return found

    try:
        yield ask
    finally:
        process.stdin.close()  # which ends it
        process.wait()


def answer(a: argparse.Namespace) -> None:
    """Read lengths of prompts, a line each, and write the figures of calls."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine says of its start is no answer
    calls = Calls(a)
    for line in sys.stdin:
        for _ in range(WARM):
            calls.one(int(line))
        print(json.dumps([calls.one(int(line)) for _ in range(a.calls)]), file=answers, flush=True)


class Calls:
    """An engine without a device, and calls that are timed."""

    def __init__(self, a: argparse.Namespace):
        flag = f"--xla_force_host_platform_device_count={a.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        import numpy as np

        from jaxllm import LLM, SamplingParams
        from jaxllm.engine.runtime import launch
        from jaxllm.engine.scheduling.buckets import Buckets

        build = Buckets.build
        Buckets.build = lambda seqs, tokens, platform: build(seqs, tokens, "gpu")  # type: ignore[method-assign]
        split = {"tensor_parallel_size": a.devices, "enable_prefix_caching": a.prefix_caching}
        self.llm = LLM(**engine_options(a.model), **OPTIONS, **split)
        replace_programs(self.llm.engine.runner, a.programs)
        self._random, self._caches = random.Random(a.seed), np.ones(CACHES // 8)
        self._params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=1
        )
        # Of the first launch, the last one's end and the arrival of the tokens
        self._launched: list[float] = []
        self._arrived = 0.0
        self._watch(self.llm.engine.runner, launch)

    def one(self, prompt: int) -> dict[str, float]:
        """Seconds of a call's parts."""
        ids = [self._random.randrange(3, 2000) for _ in range(prompt)]
        self._caches.sum()
        self._launched.clear()
        start = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], [self._params], use_tqdm=False)
        end = time.perf_counter()
        if len(output.outputs[0].token_ids) != 1:
            raise RuntimeError("a prompt got no token")
        first, last = self._launched[0], self._launched[-1]
        times = first - start, last - first, end - self._arrived, end - start
        return dict(zip(FIGURES, times, strict=True))

    def _watch(self, runner: Any, module: Any) -> None:
        """Note when programs are launched and tokens arrive."""
        dispatch, view = runner.dispatch, module.memory_of

        def noting_dispatch(key: Any, buffer: Any) -> Any:
            self._launched.append(time.perf_counter())
            found = dispatch(key, buffer)
            self._launched.append(time.perf_counter())
            return found

        def noting_view(array: Any, *rest: Any) -> Any:
            array.block_until_ready()
            self._arrived = time.perf_counter()
            return view(array, *rest)

        runner.dispatch, module.memory_of = noting_dispatch, noting_view


def replace_programs(runner: Any, programs: str) -> None:
    """Give the runner buffers as on a GPU, and programs that compute nothing."""
    from jaxllm.mesh import PINNED

    shapes, lattice = runner.shapes, runner.programs
    shapes.__dict__["host"] = shapes.replicated.with_memory_kind(PINNED)
    runner._results_pinned = True
    for kept in (lattice._variants, lattice._compiled, lattice._making, runner._bound):
        kept.clear()
    if programs == "none":
        lattice.get = lambda key: answering(lattice.variant(key), shapes)
    else:
        for key in lattice.lattice:
            lattice._variants[key] = computing_nothing(lattice.variant(key), shapes)
    runner._start_empty(runner.kv)
    runner.depth = 2


def made_by(variant: Any, shapes: Any) -> list[tuple[int | None, Any]]:
    """Of each result of a program: which argument it replaces, None for a new array, and its
    shape."""
    import jax

    from jaxllm.engine.runtime.program import Resident

    given = [x.shapes(shapes) if isinstance(x, Resident) else x for x in variant.takes]
    found = jax.eval_shape(variant.function, *given)
    return [
        (variant.takes.index(at) if isinstance(at, Resident) else None, made)
        for at, made in zip(
            variant.gives, found if len(variant.gives) > 1 else (found,), strict=True
        )
    ]


def answering(variant: Any, shapes: Any) -> Callable[..., Any]:
    """A function in place of an executable: its arguments, and zeros that are there."""
    import numpy as np

    from jaxllm.mesh import place

    made = [
        (at, None if at is not None else place(np.zeros(new.shape, new.dtype), sharding))
        for (at, new), sharding in zip(made_by(variant, shapes), variant.gives, strict=True)
    ]

    def answer(*arrays: Any) -> Any:
        found = [new if at is None else arrays[at] for at, new in made]
        return found if len(found) > 1 else found[0]

    return answer


def computing_nothing(variant: Any, shapes: Any) -> Any:
    """The variant with a function that returns its arguments, and zeros."""
    import jax.numpy as jnp

    from jaxllm.engine.runtime.program import Variant

    made: list[Any] = []

    def empty(*arrays: Any) -> Any:
        if not made:
            made.extend(made_by(variant, shapes))
        found = [jnp.zeros(x.shape, x.dtype) if at is None else arrays[at] for at, x in made]
        return tuple(found) if len(found) > 1 else found[0]

    return Variant(empty, variant.takes, variant.gives)


if __name__ == "__main__":
    main()
