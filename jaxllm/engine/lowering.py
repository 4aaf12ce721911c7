"""Lowering in processes of its own. Python lowers one program at a time, and a first start has thirty to lower.

A worker rebuilds the lattice from what was decided, on the CPU, and keeps its share of the lowered programs where the engine looks
for them. A worker that fails costs time only: the engine lowers what it does not find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import models, weights
from jaxllm.config import Resolved
from jaxllm.engine.buckets import Buckets
from jaxllm.engine.executables import Executables
from jaxllm.engine.exports import Exports, settings
from jaxllm.engine.kernels import KernelCompiler
from jaxllm.engine.memory import MemoryPlan, Need, Room
from jaxllm.engine.programs import Key, Programs
from jaxllm.engine.resolve import Setup
from jaxllm.engine.sizing import make_programs
from jaxllm.mesh import make_mesh

MOST = 6  # processes; each takes a second of a core to begin
CORES_EACH = 3


def worker_count(cores: int, platform: str) -> int:
    """Processes worth starting: none where the engine computes on the same cores, or where there are few."""
    return 0 if platform == "cpu" or cores < 2 * CORES_EACH else min(MOST, cores // CORES_EACH)


class Lowering:
    """Worker processes. Begin them early, since importing takes as long as lowering does; they end with the `with` block."""

    def __init__(self, count: int):
        root = str(Path(__file__).parents[2])
        start = f"import sys; sys.path.insert(0, {root!r}); from jaxllm.engine.lowering import main; main()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._workers: list[subprocess.Popen[str]] = []
        with contextlib.suppress(OSError):  # no memory or no processes left: fewer workers, or none
            for _ in range(count):
                self._workers.append(subprocess.Popen([sys.executable, "-P", "-c", start], **pipes))

    def __enter__(self) -> Lowering:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def start(self, setup: Setup, programs: Programs) -> None:
        """Lower what no earlier start has kept; `programs` waits for each where it needs it. Once only."""
        exports = programs.executables.exports
        if exports is None or not self._workers:
            return
        lattice = programs.keys()
        if programs.executables.platform == "gpu":
            programs.executables.kernels = KernelCompiler(programs.replicated)
        missing = [key for key in lattice if programs.is_kept(key) and not exports.has(programs.name(key))]
        for index, worker in enumerate(self._workers):
            share = missing[index :: len(self._workers)]
            futures: dict[str, Future[None]] = {programs.name(key): Future() for key in share}
            programs.executables.coming.update(futures)
            threading.Thread(target=_follow, args=(worker, _task(setup, programs, share), futures), daemon=True).start()


def main() -> None:
    """A worker: reads its task from stdin, and writes the name of each program that it has kept."""
    task = json.loads(sys.stdin.readline())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task["resolved"]["tensor_parallel_size"])
    for name, value in task["settings"].items():
        jax.config.update(name, value)
    programs = rebuild(task)
    lattice, exports = programs.keys(), programs.executables.exports
    assert exports is not None
    keys = {programs.name(key): key for key in lattice}
    for name in task["names"]:
        programs.executables.keep(name, programs.recipe(keys[name]))
        if task["platform"] == "gpu":
            exports.save_kernels(name)
        print(name, flush=True)


def rebuild(task: dict[str, Any]) -> Programs:
    """The lattice that `_task` describes, over devices of this process."""
    resolved, hf = Resolved(**task["resolved"]), task["hf"]
    mesh, dtype = make_mesh(resolved.tensor_parallel_size), jnp.dtype(resolved.dtype)
    graphdef, abstract = weights.abstract(hf, mesh, dtype)
    kv = models.kv_shape(hf, resolved.tensor_parallel_size)
    memory = MemoryPlan(Room(**task["memory"].pop("room")), **task["memory"])
    setup = Setup(resolved, hf, mesh, dtype, Need(**task["need"]), memory, Buckets.from_dict(task["buckets"]), kv, graphdef, abstract)
    folder = Path(task["folder"])
    return make_programs(setup, Executables(exports=Exports(folder.parent, folder.name), platform=task["platform"]))


def _task(setup: Setup, programs: Programs, keys: list[Key]) -> str:
    exports = programs.executables.exports
    assert exports is not None
    return json.dumps(
        {
            "settings": settings(),
            "resolved": dataclasses.asdict(setup.resolved),
            "hf": setup.hf,
            "need": dataclasses.asdict(setup.need),
            "memory": dataclasses.asdict(setup.memory),
            "buckets": setup.buckets.to_dict(),
            "folder": str(exports.folder),
            "platform": programs.executables.platform,
            "names": [programs.name(key) for key in keys],
        }
    )


def _follow(worker: subprocess.Popen[str], task: str, futures: dict[str, Future[None]]) -> None:
    """Give a worker its task and tell who waits what it has done; at its end, whatever it has not."""
    try:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(f"{task}\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if (future := futures.pop(line.strip(), None)) is not None:
                future.set_result(None)
    except (OSError, ValueError):  # it has ended, or was ended
        pass
    finally:
        for future in futures.values():
            future.set_result(None)
