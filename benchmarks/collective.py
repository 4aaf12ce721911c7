"""Times a sum over GPUs with the residual sum and norm after it, one after another, by way.

    python -m benchmarks.collective --devices 2 --rows 1 16 64 256 2048 --widths 4096 8192
    python -m benchmarks.collective --devices 2 --absent

Ways: "peers" is the kernel that stores into its peers' memory, one-shot or two-shot by its cost
rule; "nccl" and "nccl in the graph" are XLA's all-reduce by NCCL; "xla" is XLA's own choice; "none"
is the norm alone. `us` is of one sum in a chain of `--count`; below `launch_us` the host was the
limit. `error` is the largest difference of one sum from float64, and `same` says whether all
devices held the same bits in the end. With --check nothing is timed.

With --absent the last device leaves out one sum: `seconds` is how soon all devices have ended, and
`error` what the engine would be told. Then a sum of all devices must be right again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.deadline import ends_within
from benchmarks.record import finish, parser
from pallas_kernels import add_norm as alone
from pallas_kernels.all_reduce import Group, add_norm
from pallas_kernels.all_reduce.cases import Case, expected, inputs
from pallas_kernels.all_reduce.group import Layout
from pallas_kernels.all_reduce.inboxes import Inboxes, PeerTimeout, group_of
from pallas_kernels.all_reduce.plan import is_one_shot, layout_for
from pallas_kernels.all_reduce.trial import are_right, refusal
from pallas_kernels.target import Target

AXIS = "tensor"
GRAPHS = "xla_gpu_enable_command_buffer"
KERNELS = "xla_gpu_experimental_use_collective_kernels"
ALL_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
LOADING_RUNS, CALLS, TURNS = 3, 20, 3
PATIENCE_SECONDS = 2.0  # within which devices must give up one that is absent
LOST_SECONDS = 60.0  # after which this process ends if they do not

type Sum = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Way:
    """One way to add up: the back end, None for no sum at all, and XLA's options."""

    backend: str | None
    options: Mapping[str, str]


WAYS = {
    "peers": Way("mosaic_gpu_peers", {}),
    "nccl": Way("reference", {KERNELS: ""}),
    "nccl in the graph": Way("reference", {KERNELS: "", GRAPHS: ALL_GRAPHS}),
    "xla": Way("reference", {}),
    "none": Way(None, {}),
}


class Bench:
    """The arrays of one number of rows and width, and the chains over them."""

    def __init__(self, mesh: Mesh, case: Case):
        self.mesh, self.case = mesh, case
        x, parts, weight = (jnp.asarray(a, jnp.bfloat16) for a in inputs(case))
        self.wanted = expected(case, *(np.asarray(a, np.float64) for a in (x, parts, weight)))
        self._given = x, parts.reshape(-1, case.width), weight
        layout = layout_for(case.devices, case.rows, 2 * case.width)
        self.inboxes = Inboxes(mesh, AXIS, layout)

    def given(self) -> list[Any]:
        """x, the parts and the weight anew: a chain takes the buffers of the first two."""
        specs = P(), P(AXIS), P()
        return [
            jax.device_put(np.asarray(array), NamedSharding(self.mesh, spec))
            for array, spec in zip(self._given, specs, strict=True)
        ]

    def chain(self, way: Way, count: int) -> Any:
        """`count` sums, each of what the last one gave: (x, part)."""

        def body(x: Any, part: Any, weight: Any, *arrays: Any) -> tuple[Any, Any]:
            for _ in range(count):
                x, part = self._sum(way, arrays)(x, part, weight, self.case.eps)
            return x, part

        specs = (P(), P(AXIS), P(), P(AXIS), P(AXIS))
        run = jax.shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=(P(), P(AXIS)), check_vma=False
        )
        lowered = jax.jit(run, donate_argnums=(0, 1)).lower(*self.given(), *self.inboxes.arrays)
        return lowered.compile(compiler_options=dict(way.options))

    def _sum(self, way: Way, arrays: Any) -> Sum:
        if way.backend is None:
            target = Target.of(self.mesh.devices.flat[0])
            return lambda x, part, weight, eps: alone.add_norm(
                x, part, weight, eps, backend=alone.choose(target, x, weight)
            )
        group = group_of(AXIS, self.inboxes.layout, *arrays)
        if way.backend == "reference":
            group = Group(AXIS, self.case.devices)
        return lambda *given: add_norm(*given, group=group, backend=way.backend)

    def load(self, run: Any) -> None:
        """Run a program while nobody waits: once to load it, and to record it."""
        self.inboxes.expect_nobody()
        state = self.given()
        for _ in range(LOADING_RUNS):
            state[:2] = jax.block_until_ready(run(*state, *self.inboxes.arrays))
        self.inboxes.refill()

    def error(self, way: Way) -> float:
        """The largest difference of a sum and of its norm from float64, on any device."""
        run = self.chain(way, 1)
        self.load(run)
        got = jax.block_until_ready(run(*self.given(), *self.inboxes.arrays))
        self.inboxes.check()
        return max(
            float(np.abs(np.asarray(shard.data, np.float64) - right).max())
            for array, right in zip(got, self.wanted, strict=True)
            for shard in array.addressable_shards
        )

    def absent(self) -> dict[str, Any]:
        """How soon the others end when the last device leaves out a sum, and whether a sum is right
        afterwards."""
        program = leaving(self.mesh, self.case, self.inboxes.layout, "mosaic_gpu_peers")
        given = self.given()
        leave = [jax.device_put(np.array([bit], np.int32), given[0].sharding) for bit in (0, 1)]
        # Every kernel of both ways must be there before a device waits
        ready = program.lower(*given, leave[0], *self.inboxes.arrays).compile(
            compiler_options={GRAPHS: ""}
        )
        run = lambda bit: jax.block_until_ready(ready(*given, leave[bit], *self.inboxes.arrays))
        self.inboxes.expect_nobody()
        for bit in (0, 1) * LOADING_RUNS:
            run(bit)
        self.inboxes.refill()
        before = are_right(run(0), self.wanted)
        self.inboxes.check()
        begun, told = time.perf_counter(), ""
        run(1)
        seconds = time.perf_counter() - begun
        try:
            self.inboxes.check()
        except PeerTimeout as error:
            told = str(error)
        self.inboxes.refill()
        after = [are_right(run(0), self.wanted) for _ in range(LOADING_RUNS)]
        self.inboxes.check()
        return verdict(seconds, told, [before, *after])

    def times(self, way: Way, count: int) -> dict[str, Any]:
        """Microseconds of a sum, and of the host to launch it."""
        run = self.chain(way, count)
        self.load(run)
        state, found = self.given(), []
        for _ in range(TURNS):
            begun = time.perf_counter()
            for _ in range(CALLS):
                state[:2] = run(*state, *self.inboxes.arrays)
            launched = time.perf_counter() - begun
            jax.block_until_ready(state)
            found.append((time.perf_counter() - begun, launched))
        self.inboxes.check()
        seconds, launched = (1e6 * x / (CALLS * count) for x in min(found))
        ends = [np.asarray(shard.data, np.float32) for shard in state[1].addressable_shards]
        same = all(np.array_equal(end, ends[0]) for end in ends)
        return {"us": round(seconds, 2), "launch_us": round(launched, 2), "same": same}


def leaving(mesh: Mesh, case: Case, layout: Layout, backend: str) -> Any:
    """A program of one sum: (x, parts, weight, leave, inboxes, tables) -> (sum, norm). Where
    `leave` is [1] the last device has no part in it and gives back x."""

    def body(x: Any, part: Any, weight: Any, leave: Any, *arrays: Any) -> tuple[Any, Any]:
        group = Group(AXIS, case.devices)
        if backend != "reference":
            group = group_of(AXIS, layout, *arrays)
        is_last = lax.axis_index(AXIS) == case.devices - 1
        return lax.cond(
            is_last & (leave[0] == 1),
            lambda: (x, x),
            lambda: add_norm(x, part, weight, case.eps, group=group, backend=backend),
        )

    specs = (P(), P(AXIS), P(), P(), P(AXIS), P(AXIS))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def verdict(seconds: float, told: str, right: list[bool]) -> dict[str, Any]:
    """The row of an absent device; `right` is of the sum before and of those after."""
    ok = bool(told) and 0 < seconds < PATIENCE_SECONDS and all(right)
    return {"absent": 1, "seconds": round(seconds, 4), "error": told, "right": right, "ok": ok}


def measure_absent(mesh: Mesh, rows: list[int], widths: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each shape. Ends the process when a device waits for ever."""
    for width in widths:
        for count in rows:
            case = Case(name="bench", rows=count, width=width, devices=mesh.shape[AXIS])
            with ends_within(LOST_SECONDS, f"a sum of {count} rows that one device left out"):
                row = Bench(mesh, case).absent()
            yield {"rows": count, "width": width} | row


def rows_of(
    mesh: Mesh, rows: int, width: int, ways: list[str], count: int
) -> Iterator[dict[str, Any]]:
    """Figures of every way; `count` 0 for the error alone."""
    devices = mesh.shape[AXIS]
    bench = Bench(mesh, Case(name="bench", rows=rows, width=width, devices=devices))
    for name in ways:
        way, row = WAYS[name], {"devices": devices, "rows": rows, "width": width, "way": name}
        if name == "peers":
            row["one_shot"] = is_one_shot(devices, rows * width * 2)
        if way.backend is not None:
            row["error"] = round(bench.error(way), 5)
        yield row | (bench.times(way, count) if count else {})


def main() -> int:
    """Time, or check, the ways that were named; 1 when something is not ok."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--devices", type=int, default=2)
    args.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 2048])
    args.add_argument("--widths", type=int, nargs="+", default=[4096, 8192])
    args.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args.add_argument("--count", type=int, default=128, help="sums of a chain")
    args.add_argument("--check", action="store_true", help="compare with float64 alone")
    args.add_argument("--absent", action="store_true", help="leave a device out of a sum, alone")
    a = args.parse_args()
    mesh = Mesh(np.asarray(jax.devices()[: a.devices]), (AXIS,))
    refused, ways = refusal(mesh, AXIS), a.ways
    print({"peers": refused or "right in a trial"}, flush=True)
    if refused:
        ways = [way for way in ways if way != "peers"]
    if a.absent and refused:
        raise SystemExit(f"--absent needs GPUs that store into their peers' memory: {refused}")
    found = (
        measure_absent(mesh, a.rows, a.widths)
        if a.absent
        else (
            row
            for width in a.widths
            for count in a.rows
            for row in rows_of(mesh, count, width, ways, 0 if a.check else a.count)
        )
    )
    rows = []
    for row in found:
        print(row, flush=True)
        rows.append(row)
        finish("collective", a, rows)
    return int(any(row.get("ok") is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
