"""Compiles a sum over several H200s that are not here, in a process of its own: the compiler writes
its PTX to standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.runtime.cards import CARDS
from tests.engine.runtime.h200 import COMPILER


class Compiled(NamedTuple):
    """What a sum became: lines of the kernel's PTX, and of the program's HLO."""

    ptx: list[str]
    hlo: list[str]


def compiled(*wanted: dict[str, Any]) -> list[Compiled]:
    """Compile `main`'s programs."""
    repo = str(Path(__file__).parents[2])
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.startswith("JAX_")
    }
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *map(json.dumps, wanted)],
        cwd=repo,
        env=kept
        | {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_PTX": "1",
            "PYTHONPATH": os.pathsep.join([str(COMPILER), repo]),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found = []
    for part in done.stdout.split("PTX of one\n")[1:]:
        ptx, hlo = part.split("HLO of one\n")
        code = ptx.partition(".debug_abbrev")[0]
        lines = [line.strip() for line in code.splitlines()]
        found.append(Compiled([line for line in lines if line], hlo.splitlines()))
    return found


def _compile(op: str, devices: int, rows: int, width: int) -> str:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks.collective import GRAPHS, leaving
    from pallas_kernels.all_reduce import Group, Inbox, add_norm, all_reduce, largest
    from pallas_kernels.all_reduce.cases import Case
    from pallas_kernels.all_reduce.plan import layout_for
    from pallas_kernels.all_reduce.protocol import TABLE

    shape = {"target_config": CARDS["h200"].target, "topology": f"1x1x{devices}"}
    target = topologies.get_topology_desc(platform="cuda", **shape).devices
    mesh = Mesh(np.asarray(target), ("tensor",))
    layout = layout_for(devices, rows, 2 * width, 8 * rows)

    kept = {"xla_gpu_autotune_level": 0}

    def run(x: Any, part: Any, weight: Any, words: Any, table: Any) -> Any:
        group = Group("tensor", devices, Inbox(words, table, layout))
        options = {"group": group, "backend": "mosaic_gpu_peers"}
        if op == "add_norm":
            return add_norm(x, part, weight, 1e-5, **options)
        if op == "all_reduce":
            return all_reduce(part, **options)
        return largest(x[:, 0].astype(jnp.float32), x[:, 1].astype(jnp.int32), **options)

    over = P("tensor")
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((rows, width), jnp.bfloat16, P()),
            ((devices * rows, width), jnp.bfloat16, over),
            ((width,), jnp.bfloat16, P()),
            ((devices * layout.size // 4,), jnp.int32, over),
            ((devices * TABLE,), jnp.int32, over),
        )
    ]
    if op == "absent":
        leave = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, P()))
        case = Case(name="", rows=rows, width=width, devices=devices)
        program = leaving(mesh, case, layout, "mosaic_gpu_peers")
        lowered = program.lower(*given[:3], leave, *given[3:])
        return lowered.compile(compiler_options=kept | {GRAPHS: ""}).as_text()
    specs = (P(), over, P(), over, over)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    lowered = jax.jit(mapped).lower(*given)
    return lowered.compile(compiler_options=kept).as_text()


def main() -> None:
    """Compile each argument, a JSON object of `_compile`'s arguments."""
    for argument in sys.argv[1:]:
        print("PTX of one", flush=True)
        hlo = _compile(**json.loads(argument))
        print("\nHLO of one")
        print(hlo, flush=True)


if __name__ == "__main__":
    main()
