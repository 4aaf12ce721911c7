"""XLA's compiler for a GPU that is not here, by default an H200, in a process of its own.

JAX's CUDA plugin compiles for a device description without a driver: XLA, Triton, Mosaic and ptxas
run. `tools/cuda-compiler` puts the plugin into a folder outside Python's path, and only the process
started here finds it. Memory kinds are lost on described devices, so programs are lowered over CPU
devices, which know pinned host memory, and the module is handed to the description's client.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPILER = Path(sys.prefix) / "cuda-compiler"
PAGE_SIZE, PAGES, PAGES_PER_REQUEST, SLOTS, TOKENS, MOVED = 64, 4096, 512, 256, 8192, 8
LEAST_WEIGHT = 8 << 20  # bytes; nothing that a step of few rows computes has as many
POOLS = ("pool", "encode")  # forwards of models that pool
COLLECTIVES = (
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
HOST_MEMORY = 5  # XLA's number of it in layouts
ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "f8e4m3fn": 1, "pred": 1}


def missing() -> str | None:
    """Why nothing can be compiled for an H200 here, for `pytest.skip`; None when it can."""
    import jaxlib

    if (COMPILER / f"jax_cuda13_plugin-{jaxlib.__version__}.dist-info").is_dir():
        return None
    return "XLA's compiler for NVIDIA GPUs is not installed: make cuda-compiler"


class Compiler:
    """A process that compiles step programs and reports on each."""

    def __init__(self, card: str = "h200", module: str = __name__) -> None:
        """A process compiles for one kind of GPU, named as in `cards.CARDS` and `MEMORIES`: LLVM
        keeps the first architecture that it is given. It runs the `main` of a module."""
        repo = str(Path(__file__).parents[3])
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "XLA_FLAGS" and not name.startswith("JAX_")
        } | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "PYTHONPATH": os.pathsep.join([str(COMPILER), repo]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, card],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=repo,
            env=environment,
        )

    def reports(self, **wanted: Any) -> list[dict[str, Any]]:
        """Reports on the programs that `reports_on` chooses."""
        return self.answer(**wanted)

    def answer(self, **wanted: Any) -> Any:
        """What the module's `main` says to a line with these values."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the compiling process ended; its error is above"
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def copies(hlo: str, sizes: set[int]) -> list[str]:
    """Instructions of compiled HLO that copy as many bytes as one of `sizes`, or more than all."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r" = \(?(\w+)\[([\d,]*)\].* copy(?:-start)?\(", line)
        if match:
            items = math.prod(int(size) for size in match[2].split(",") if size)
            size = items * ITEM_BYTES[match[1]]
            if size in sizes or size > max(sizes):
                found.append(line.strip())
    return found


def host_reads(hlo: str) -> list[str]:
    """Operations of compiled HLO that read an argument in pinned host memory."""
    names = re.findall(rf"(%\S+) = \S+S\({HOST_MEMORY}\)\}} parameter\(", hlo)
    uses = re.compile("|".join(rf"{re.escape(name)}[,)]" for name in names))
    lines = hlo.splitlines() if names else []
    return [line.split("(%")[0].split()[-1] for line in lines if uses.search(line)]


def joined(hlo: str, least: int) -> list[str]:
    """Instructions of compiled HLO that write arrays of at least so many bytes side by side."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r"%\S*concatenate\S* = (\w+)\[([\d,]+)\]", line)
        if match:
            items = math.prod(int(size) for size in match[2].split(","))
            if items * ITEM_BYTES[match[1]] >= least:
                found.append(line.strip())
    return found


def aliased(hlo: str) -> set[int]:
    """Numbers of the parameters whose buffers compiled HLO gives to results."""
    head = hlo[: hlo.index("\n")]
    alias = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", head)
    return {int(n) for n in re.findall(r"\((\d+), \{\}", alias[1])} if alias else set()


@functools.cache
def described(devices: int, card: str = "h200") -> Any:
    """Described GPUs of one host."""
    from jax.experimental import topologies

    from tests.engine.runtime.cards import CARDS, MEMORIES

    shape = {"target_config": (CARDS | MEMORIES)[card].target, "topology": f"1x1x{devices}"}
    return topologies.get_topology_desc(platform="cuda", **shape).devices


@functools.cache
def _lattice(
    model: str,
    layers: int | None,
    kv_dtype: str,
    devices: int,
    kind: str,
    quantization: str | None = None,
    peers: bool = False,
    groups: int = 1,
    stage: tuple[int, int] = (0, 1),
    head_group: int | None = None,
    backend: str = "mosaic_gpu",
) -> Any:
    """The lattice of a benchmark's shape with the limits that the engine takes on an H200; of an
    embedding model of that shape for a `kind` of its forwards, and "" for all others."""
    from benchmarks.shapes import ALWAYS, SHAPES
    from jaxllm.engine.scheduling.buckets import Buckets
    from jaxllm.mesh import Stage, make_mesh, over_experts
    from jaxllm.pooling import Pooling
    from jaxllm.quantisation import WeightFormat
    from tests.engine.runtime.step_programs import lattice

    pools, mode = kind in POOLS, "cls" if kind == "encode" else "last"
    embeds = Pooling(
        task="embed",
        modes=(mode,),
        maps=(),
        size=SHAPES[model]["hidden_size"],
        bidirectional=kind == "encode",
    )
    return lattice(
        ALWAYS | SHAPES[model] | ({"num_hidden_layers": layers} if layers else {}),
        over_experts(make_mesh(devices), groups),
        backend,
        (Buckets.pooling if pools else Buckets.build)(SLOTS, TOKENS, "gpu"),
        page_size=PAGE_SIZE,
        pages=PAGES,
        kv_dtype=kv_dtype,
        pages_per_request=PAGES_PER_REQUEST,
        max_logprobs=20,
        moved_pages=MOVED,
        platform="gpu",
        pooling=embeds if pools else None,
        quantization=quantization,
        peers=peers,
        stage=Stage(*stage),
        head=None if head_group is None else WeightFormat("int8", head_group, scales="float16"),
    )


def reports_on(
    model: str,
    kind: str,
    places: list[int] | None = None,
    *,
    layers: int | None = 2,
    kv_dtype: str = "bfloat16",
    devices: int = 1,
    donating: bool = True,
    quantization: str | None = None,
    peers: bool = False,
    groups: int = 1,
    stage: Sequence[int] = (0, 1),
    head_group: int | None = None,
    kept: bool = False,
    backend: str = "mosaic_gpu",
    card: str = "h200",
) -> list[dict[str, Any]]:
    """Compile the programs of a kind and say what came of each.

    Args:
        places: Which of them, in the order of their rows; None for all.
        layers: Layers of the model; None for as many as it has.
        donating: False plants the failure that the tests are to find: no buffer is given away.
        quantization: What weights are rounded to.
        peers: Devices add up through inboxes.
        groups: Groups of devices that have experts of their own.
        stage: Number of the stage whose programs they are, and of all stages.
        head_group: Columns that share a scale (float16) in a head of int8; None: a plain head.
        kept: As a later start reads them, which lowers nothing.
        backend: Of the attention kernels.
        card: The GPU, one for all calls in a process.
    """
    from jaxllm.engine.runtime.programs import PROGRAMS

    pools = kind if kind in POOLS else ""
    options = quantization, peers, groups, tuple(stage), head_group, backend
    programs = _lattice(model, layers, kv_dtype, devices, pools, *options)
    keys = [key for key in programs.lattice if key.program == kind]
    # Of steps with as many rows, those with decodes last: they have all that others have
    keys.sort(key=lambda key: (PROGRAMS[kind].rows(key.sizes), key.sizes[::-1]))
    return [
        _report(programs, keys[place], donating, described(devices, card), kept)
        for place in (range(len(keys)) if places is None else places)
    ]


def _read_back(name: str, recipe: Any) -> Any:
    """The function of a recipe by way of the bytes that a start keeps."""
    import jax

    from jaxllm.engine.runtime.compilation.exports import calling, export

    body = export(recipe.function, recipe.arguments, "gpu").serialize()
    return calling(name, jax.export.deserialize(body), recipe.out)


def _report(programs: Any, key: Any, donating: bool, targets: Any, kept: bool) -> dict[str, Any]:
    import jax
    from jax.extend.backend import get_compile_options
    from jaxlib.xla_client import DeviceList

    from jaxllm.engine.runtime.compilation.executables import Executables
    from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
    from jaxllm.engine.runtime.programs import PROGRAMS

    recipe = programs.recipe(key)
    devices = len(targets)
    begun = time.perf_counter()
    large = jax.tree.leaves((programs.shapes.kv, programs.shapes.peers[:1]))
    pages = {x.size * x.dtype.itemsize // devices for x in large}
    donated, number = set(), 0
    for place, argument in enumerate(recipe.arguments):
        size = len(jax.tree.leaves(argument))
        donated |= {*range(number, number + size)} if place in recipe.donated else set()
        number += size
    report = {"name": programs.name(key), "refused": None}
    jitted = jax.jit(
        _read_back(programs.name(key), recipe) if kept else recipe.function,
        donate_argnums=recipe.donated if donating else (),
        out_shardings=recipe.out,
        keep_unused=True,
    )
    table = XlaOptions.of(
        targets[0].device_kind, 15e9 if programs.shapes.hidden_states.shape[1] > 2048 else 1e9
    )
    rows = PROGRAMS[key.program].rows(key.sizes)
    options = Executables(table, platform="gpu").options(key.program, rows) | {
        "xla_gpu_autotune_level": 0
    }
    try:
        lowered = jitted.trace(*recipe.arguments).lower(lowering_platforms=("cuda",))
        compiled = targets[0].client.compile(
            lowered.compiler_ir("stablehlo"),
            DeviceList(tuple(targets)),
            get_compile_options(
                1,
                devices,
                device_assignment=[[*range(devices)]],
                env_options_overrides=options,
            ),
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return report | {"refused": f"{type(error).__name__}: {error}"}
    hlo, memory = compiled.hlo_modules()[0].to_string(), compiled.get_compiled_memory_stats()
    return report | {
        "seconds": time.perf_counter() - begun,
        "needed_bytes": memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "not_aliased": sorted(donated - aliased(hlo)),
        "copies": copies(hlo, pages),
        "host_reads": host_reads(hlo),
        "joined": joined(hlo, LEAST_WEIGHT),
        "calls": Counter(re.findall(r'custom_call_target="([^"]+)"', hlo)),
        "kernels": Counter(re.findall(r'op_name="[^"]*?(\w+)/mpmd_map', hlo)),
        "collectives": Counter(re.findall(COLLECTIVES, hlo)),
        "computed_again": len(re.findall(r"^\s+(?:ROOT )?%\S*\.remat\S* = ", hlo, re.MULTILINE)),
    }


def main() -> None:
    """Answer each line of standard input, a JSON object of `reports_on`'s arguments, for the card
    that is named on the command line."""
    for line in sys.stdin:
        print(json.dumps(reports_on(**json.loads(line), card=sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
