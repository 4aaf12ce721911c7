"""Programs lowered and compiled in processes of their own, for a first start.

Python lowers one program at a time, and XLA and Mosaic take turns at one process's LLVM, whose options they set differently: threads
that compile programs with both kinds of kernels mostly wait. Processes do not. A worker rebuilds the lattice from what was decided,
keeps each lowered program where the engine looks for it, compiles it into XLA's persistent cache where that is allowed, and says so.
Programs that do not depend on the pool's size are made while that is found. The engine compiles each then as a later start would.
Programs whose kernels XLA chooses by timing them are compiled by the engine: one process at a time may time. A worker that fails costs
time only, since the engine makes what it does not find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
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
from jaxllm.engine.memory import MemoryPlan, Need, Room
from jaxllm.engine.programs import Key, Programs
from jaxllm.engine.resolve import Setup
from jaxllm.engine.sizing import make_programs, options_of
from jaxllm.mesh import make_mesh

MOST = 10  # processes; each takes two seconds of a core to begin
CORES = 5 / 8  # of the machine's; compilers have threads of their own
MEMORY = 5 * 2**28  # bytes of a device that a process takes which has it open
CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@dataclass(frozen=True)
class Crew:
    """How many workers, whether they compile what they lower, and JAX's platform in them: the engine's own if they do."""

    count: int
    compiling: bool = False
    platform: str = "cpu"

    @classmethod
    def of(cls, cores: int, platform: str, devices: int, spare: int) -> Crew:
        """For an engine that leaves `spare` bytes of each of its devices to others: none where it computes on the same cores, or where
        there are few. A mesh of several devices is left to one process."""
        count = min(MOST, int(cores * CORES))
        if platform == "cpu" or count < 3:
            return cls(0)
        fitting = min(count, spare // MEMORY)
        return cls(fitting, True, platform) if platform == "gpu" and devices == 1 and fitting >= 3 else cls(count)


@dataclass
class _Worker:
    """A process, whose turn it is to talk to it, and the task that it has."""

    process: subprocess.Popen[str]
    turn: threading.Lock = field(default_factory=threading.Lock)
    task: str = ""


class Workers:
    """The processes. Begin them early, since importing takes as long as lowering does; they end with the `with` block."""

    def __init__(self, crew: Crew):
        self.crew = crew
        root = str(Path(__file__).parents[2])
        start = (
            f"import sys; sys.path.insert(0, {root!r}); from jaxllm.engine.workers import main; main({crew.platform!r}, {crew.compiling})"
        )
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._workers: list[_Worker] = []
        with contextlib.suppress(OSError):  # no memory or no processes left: fewer workers, or none
            for _ in range(crew.count):
                self._workers.append(_Worker(subprocess.Popen([sys.executable, "-P", "-c", start], **pipes)))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()

    def start(self, setup: Setup, programs: Programs, keys: Iterable[Key]) -> None:
        """Have made those of these programs that no earlier start has kept and that are not on their way; `programs` waits for each where
        it needs it."""
        exports, coming = programs.executables.exports, programs.executables.coming
        if exports is None or not self._workers:
            return
        names = [name for name in map(programs.name, filter(programs.is_kept, keys)) if name not in coming and not exports.has(name)]
        queue = deque((name, Future[None]()) for name in names)
        coming.update(queue)
        threading.Thread(target=_hand_out, args=(self._workers, _task(setup, programs), queue), daemon=True).start()


def main(platform: str, compiling: bool) -> None:
    """A worker: reads a task from stdin, then name after name of its programs, and writes each when it has made it. Another task, a JSON
    object like the first, may come after any of them."""
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if platform == "gpu":
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
        jax.devices()  # opens the device, while the engine still decides
    first = sys.stdin.readline()
    _configure(platform, json.loads(first))
    programs, keys = None, {}
    for line in itertools.chain([first], sys.stdin):
        if line.startswith("{"):
            programs = rebuild(json.loads(line))
            keys = {programs.name(key): key for key in programs.keys()}  # noqa: SIM118, no mapping
            continue
        assert programs is not None
        name = line.strip()
        programs.executables.keep(name, programs.recipe(keys[name]))
        if compiling and not programs.is_tuned(keys[name]):
            programs.get(*keys[name])
        print(name, flush=True)


def _configure(platform: str, task: dict[str, Any]) -> None:
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", task["devices"])
    for name, value in task["settings"].items():
        jax.config.update(name, value)


def rebuild(task: dict[str, Any]) -> Programs:
    """The lattice that `_task` describes, over devices of this process."""
    resolved, hf = Resolved(**task["resolved"]), task["hf"]
    mesh, dtype = make_mesh(resolved.tensor_parallel_size), jnp.dtype(resolved.dtype)
    graphdef, abstract = weights.abstract(hf, mesh, dtype)
    kv = models.kv_shape(hf, resolved.tensor_parallel_size)
    memory = MemoryPlan(Room(**task["memory"].pop("room")), **task["memory"])
    setup = Setup(resolved, hf, mesh, dtype, Need(**task["need"]), memory, Buckets.from_dict(task["buckets"]), kv, graphdef, abstract)
    folder = Path(task["folder"])
    return make_programs(setup, Executables(options_of(setup), Exports(folder.parent, folder.name), task["platform"]))


def _task(setup: Setup, programs: Programs) -> str:
    exports = programs.executables.exports
    assert exports is not None
    return json.dumps(
        {
            "settings": settings() | {name: getattr(jax.config, name) for name in CACHE},
            "resolved": dataclasses.asdict(setup.resolved),
            "hf": setup.hf,
            "need": dataclasses.asdict(setup.need),
            "memory": dataclasses.asdict(setup.memory),
            "buckets": setup.buckets.to_dict(),
            "folder": str(exports.folder),
            "platform": programs.executables.platform,
            "devices": jax.device_count(),  # a cache's entries are of a number of devices
        }
    )


def _hand_out(workers: list[_Worker], task: str, queue: deque[tuple[str, Future[None]]]) -> None:
    """Have all that is queued made, and tell who waits for it; in the end too what nobody is left to make."""
    threads = [threading.Thread(target=_follow, args=(worker, task, queue), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, made in queue:
        made.set_result(None)


def _follow(worker: _Worker, task: str, queue: deque[tuple[str, Future[None]]]) -> None:
    """Give a worker the task, then name after name while it answers."""
    with worker.turn, contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or was ended; nothing is left
        if queue and worker.task != task:
            _tell(worker.process, task)
            worker.task = task
        while True:
            name, made = queue.popleft()
            try:
                _tell(worker.process, name)
                alive = bool(_answer(worker.process))
            finally:
                made.set_result(None)
            if not alive:
                return


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{line}\n")
    worker.stdin.flush()


def _answer(worker: subprocess.Popen[str]) -> str:
    """The next line that a worker says; empty when it has ended."""
    assert worker.stdout is not None
    return worker.stdout.readline()
