"""Programs lowered and compiled in processes of their own, for a first start.

Python lowers one program at a time. XLA and Mosaic take turns at one process's LLVM, whose options
they set differently, so threads that compile programs with both kinds of kernels mostly wait.
Processes do not.

Workers start before devices are opened, since importing and opening a device take as long as
several programs. They get the resolved configuration later, rebuild the programs from it, keep each
lowered program where the engine looks for it, and compile it into XLA's persistent cache where that
is allowed. While the pool's size is found, they make the programs of the expected pool, or those
that do not depend on it. The engine then compiles each program as a later start would. It compiles
itself the programs whose kernels XLA chooses by timing, since one process at a time may time. A
worker that fails costs time only: the engine makes what it does not find. A task is of one stage of
a pipeline; workers have as many devices as the engine, and take the first ones for any stage, since
a lowered program names none.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import weights
from jaxllm.cache.backends import Target
from jaxllm.config import Resolved
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports, settings
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.lattice import Lattice, make_programs
from jaxllm.mesh import Stage, make_mesh, over_experts
from jaxllm.models import make_spec

type _Queue = deque[tuple[str, Future[None]]]

MAX_WORKERS = 10  # each takes two seconds of a core to start
CORE_SHARE = 5 / 8  # of the machine's cores; compilers have threads of their own
DEVICE_BYTES = 1200 * 2**20  # that a process takes of a device that it has open
OWN_BYTES = 3 * 2**29  # that the engine takes besides its share: context, code, kernels' stacks
CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

_ROOT = str(Path(__file__).parents[3])
_START = (
    "-P",
    "-c",
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from jaxllm.engine.startup.compile_workers import main; main()",
)


@dataclass(frozen=True)
class WorkerSpec:
    """Configuration of the workers.

    Attributes:
        count: processes.
        compiling: they compile what they lower.
        platform: JAX's platform in them, the engine's own if they compile.
    """

    count: int
    compiling: bool = False
    platform: str = "cpu"

    @classmethod
    def within(cls, cores: int, platform: str, devices: int, spare: int) -> WorkerSpec:
        """Workers beside an engine that leaves `spare` bytes of each device to others.

        There are none where the engine computes on the same cores, or where cores are few. They do
        not compile for several `devices`, those of all stages.
        """
        count = early_count(cores)
        if platform == "cpu" or not count:
            return cls(0)
        fitting = min(count, (spare - OWN_BYTES) // DEVICE_BYTES)
        if platform == "gpu" and devices == 1 and fitting >= 3:
            return cls(fitting, True, platform)
        return cls(count)


def early_count(cores: int) -> int:
    """Workers to start before the engine's devices are known; none where cores are few."""
    count = min(MAX_WORKERS, int(cores * CORE_SHARE))
    if count >= 3:
        return count
    return 0


@dataclass
class _Worker:
    """A worker process.

    Attributes:
        turn: held by the thread that talks to it.
        task: the last one it was given.
    """

    process: subprocess.Popen[str]
    turn: threading.Lock = field(default_factory=threading.Lock)
    task: str = ""


class CompileWorkers(contextlib.AbstractContextManager["CompileWorkers"]):
    """Processes that import, wait to be configured, and end with the `with` block."""

    def __init__(self, count: int = 0):
        self._workers: list[_Worker] = []
        # Of each stage, programs of its last `start` that no worker has begun
        self._queues: dict[Stage, _Queue] = {}
        self._begin(count)

    def __exit__(self, *_: object) -> None:
        self._end(self._workers)

    def configure(self, spec: WorkerSpec) -> None:
        """Configure `spec.count` processes; start missing ones, end the others."""
        self._end(self._workers[spec.count :])
        del self._workers[spec.count :]
        self._begin(spec.count - len(self._workers))
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended
                _tell(worker, json.dumps([spec.platform, spec.compiling]))

    def start(self, lattice: Lattice, programs: Programs, keys: Iterable[Key]) -> None:
        """Make those programs of a lattice that no earlier start has kept and that are not
        on their way; `programs` waits for each where it needs it. Programs of the stage that were
        asked for earlier and are not among `keys` are dropped, unless a worker has begun them.

        Workers turn to a stage when they have begun all programs of those before. Each stage calls
        it from one thread.
        """
        exports = programs.executables.exports
        coming = programs.executables.coming
        if exports is None or not self._workers:
            return
        wanted = [*map(programs.name, filter(programs.is_kept, keys))]
        before = self._queues.get(lattice.stage, deque())
        for name, made in [*before]:
            if name not in wanted:
                with contextlib.suppress(ValueError):  # a worker has begun it
                    before.remove((name, made))
                    made.set_result(None)
        queue = self._queues[lattice.stage] = deque(
            (name, Future[None]())
            for name in wanted
            if name not in coming and not exports.has(name)
        )
        if not queue:
            return
        coming.update(queue)
        threading.Thread(
            target=_hand_out, args=(self._workers, _task(lattice, programs), queue), daemon=True
        ).start()

    def _begin(self, count: int) -> None:
        with contextlib.suppress(OSError):  # no memory or no processes left: fewer workers, or none
            for _ in range(count):
                process = subprocess.Popen(
                    [sys.executable, *_START],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                self._workers.append(_Worker(process))

    @staticmethod
    def _end(workers: list[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.communicate()


def main() -> None:
    """A worker. It reads lines: JAX's platform and whether to compile, then a task, then names of
    its programs. It writes each name when the program is made. Another task, a JSON object like the
    first, may come after any name."""
    if not (configured := sys.stdin.readline()):
        return
    platform, compiling = json.loads(configured)
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if platform == "gpu":
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
        jax.devices()  # opens the device, while the engine still decides
    if not (first := sys.stdin.readline()):
        return
    task = json.loads(first)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", task["devices"])
    for name, value in task["settings"].items():
        jax.config.update(name, value)
    for line in itertools.chain([first], sys.stdin):
        if line.startswith("{"):
            programs = rebuild(json.loads(line))
            keys = {programs.name(key): key for key in programs.lattice}
            continue
        key = keys[name := line.strip()]
        programs.executables.keep(name, programs.recipe(key))
        if compiling and not programs.is_tuned(key):
            programs.get(key)
        print(name, flush=True)


def rebuild(task: dict[str, Any]) -> Programs:
    """The programs that `_task` describes, over devices of this process."""
    spec = make_spec(**task["model"])
    target = Target.of_dict(task["resolved"]["target"])
    resolved = Resolved(**task["resolved"] | {"pooling": spec.pooling, "target": target})
    dtype = jnp.dtype(resolved.dtype)
    stage = Stage(**task["stage"])
    mesh = over_experts(make_mesh(resolved.tensor_parallel_size), resolved.expert_parallel_size)
    outline = weights.outline(spec, mesh, dtype, stage)
    lattice = Lattice(
        resolved=resolved,
        spec=spec,
        mesh=mesh,
        dtype=dtype,
        stage=stage,
        buckets=Buckets.from_dict(task["buckets"]),
        asked_length=task["asked_length"],
        weight_bytes=task["weight_bytes"],
        apart=task["apart"],
        outline=outline,
    )
    folder = Path(task["folder"])
    exports = Exports(folder.parent, folder.name)
    return make_programs(lattice, Executables(lattice.options, exports, task["platform"]))


def _task(lattice: Lattice, programs: Programs) -> str:
    exports = programs.executables.exports
    assert exports is not None
    return json.dumps(
        {
            "settings": settings() | {name: getattr(jax.config, name) for name in CACHE},
            "resolved": dataclasses.asdict(lattice.resolved),
            "model": lattice.spec.to_dict(),
            "stage": dataclasses.asdict(lattice.stage),
            "buckets": lattice.buckets.to_dict(),
            "asked_length": lattice.asked_length,
            "weight_bytes": lattice.weight_bytes,
            "apart": lattice.apart,
            "folder": str(exports.folder),
            "platform": programs.executables.platform,
            "devices": jax.device_count(),  # a cache's entries are of a number of devices
        }
    )


def _hand_out(workers: list[_Worker], task: str, queue: _Queue) -> None:
    """Have workers make the queued programs, and resolve each one's future; in the end also those
    that no worker is left to make."""
    # The system gives this process no more threads: fewer workers, or none
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(len(workers)) as pool:
        for worker in workers:
            pool.submit(_follow, worker, task, queue)
    with contextlib.suppress(IndexError):
        while True:
            queue.popleft()[1].set_result(None)


def _follow(worker: _Worker, task: str, queue: _Queue) -> None:
    """Give a worker the task, then name after name while it answers."""
    # The worker has ended, or the queue is empty
    with worker.turn, contextlib.suppress(OSError, ValueError, IndexError):
        if queue and worker.task != task:
            _tell(worker, task)
            worker.task = task
        alive = True
        while alive:
            name, made = queue.popleft()
            try:
                _tell(worker, name)
                assert worker.process.stdout is not None
                alive = bool(worker.process.stdout.readline())  # empty when it has ended
            finally:
                made.set_result(None)


def _tell(worker: _Worker, line: str) -> None:
    print(line, file=worker.process.stdin, flush=True)
