"""Records which functions of a checkout run, in every process that Python starts.

The measuring script copies this file to a folder of its own as `sitecustomize.py` and puts that
folder into `PYTHONPATH`, so that each interpreter, child processes as well, records from its first
line on. `sys.monitoring` sees every thread, also those that other libraries start.

A file of one byte, shared by all processes, names the phase that is measured. In a phase below
`EVERY` each function is written down at its first entry, as a line of JSON in a file of the
process; from `EVERY` on every entry is. Code that runs while a module is imported (the module's
own, bodies of classes, what decorators call) is no function that runs.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

ROOT_VARIABLE, FOLDER_VARIABLE = "WALKS_ROOT", "WALKS_FOLDER"
PHASE_FILE = "phase"
PACKAGES = ("jaxllm", "pallas_kernels")
EVERY = 128
TRACERS = os.path.join("jax", "_src", "interpreters", "partial_eval.py")


class Recorder:
    """Writes entries of the functions under a checkout's packages.

    Attributes:
        phase: the shared byte.
    """

    def __init__(self, root: Path, folder: Path):
        self.root = f"{root}{os.sep}"
        self._roots = tuple(f"{root / package}{os.sep}" for package in PACKAGES)
        with (folder / PHASE_FILE).open("r+b") as file:
            self.phase = mmap.mmap(file.fileno(), 1)
        self._folder = folder
        self._seen: set[tuple[int, CodeType]] = set()
        self._plans: list[object] = []
        self._traces: list[FrameType] = []
        self._open()

    def _open(self) -> None:
        """Begin the file of this process, also of one that was forked."""
        self._file = (self._folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def begin(self) -> None:
        """Record from now on."""
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "walks")
        events = monitoring.events
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(monitoring.PROFILER_ID, event, self._entered)
        monitoring.register_callback(monitoring.PROFILER_ID, events.PY_THROW, self._thrown_into)
        monitoring.register_callback(monitoring.PROFILER_ID, events.PY_RETURN, self._returned)
        watched = events.PY_START | events.PY_RESUME | events.PY_THROW | events.PY_RETURN
        monitoring.set_events(monitoring.PROFILER_ID, watched)
        os.register_at_fork(after_in_child=self._open)

    def _is_ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._roots)

    def _entered(self, code: CodeType, offset: int) -> object:
        if not self._is_ours(code):
            return sys.monitoring.DISABLE
        self._enter(code, sys._getframe(1))
        return None

    def _thrown_into(self, code: CodeType, offset: int, error: BaseException) -> None:
        """A coroutine goes on with an exception, as one that is cancelled."""
        if self._is_ours(code):
            self._enter(code, sys._getframe(1))

    def _enter(self, code: CodeType, frame: FrameType) -> None:
        phase = self.phase[0]
        if not code.co_flags & inspect.CO_OPTIMIZED or (phase, code) in self._seen:
            return  # a module's code, or a class's; or an entry that is known
        if self._is_importing(frame):
            return
        if phase < EVERY:
            self._seen.add((phase, code))
        self._write(phase, code, "entered", self._trace(frame) if phase >= EVERY else 0)

    def _returned(self, code: CodeType, offset: int, value: object) -> object:
        """Note when the model's description has been read, and each new plan of memory."""
        if not self._is_ours(code):
            return sys.monitoring.DISABLE
        phase = self.phase[0]
        if code.co_name == "read_spec":
            self._write(phase, code, "spec", 0)
        elif type(value).__name__ == "MemoryPlan" and not any(p is value for p in self._plans):
            self._plans.append(value)
            self._write(phase, code, "plan", 0)
        return None

    def _is_importing(self, frame: FrameType | None) -> bool:
        """Whether a module of ours is being imported below this frame."""
        while frame is not None:
            code = frame.f_code
            if code.co_name == "<module>" and self._is_ours(code):
                return frame.f_globals["__name__"] != "__main__"
            frame = frame.f_back
        return False

    def _write(self, phase: int, code: CodeType, event: str, trace: int) -> None:
        file = code.co_filename.removeprefix(self.root)
        entry = {
            "ns": time.monotonic_ns(),
            "pid": os.getpid(),
            "thread": threading.get_ident(),
            "phase": phase,
            "event": event,
            "file": file,
            "function": code.co_qualname,
            "trace": trace,
        }
        self._file.write(f"{json.dumps(entry)}\n")

    def _trace(self, frame: FrameType | None) -> int:
        """The number of the outermost trace that JAX makes below this frame; 0 without one."""
        outermost = None
        while frame is not None:
            code = frame.f_code
            if code.co_name.startswith("trace_to_jaxpr") and code.co_filename.endswith(TRACERS):
                outermost = frame
            frame = frame.f_back
        if outermost is None:
            return 0
        if outermost not in self._traces:
            self._traces.append(outermost)
        return self._traces.index(outermost) + 1


def main() -> None:
    """Record this process if the measuring script started it, or a process of its did."""
    if ROOT_VARIABLE in os.environ:
        Recorder(Path(os.environ[ROOT_VARIABLE]), Path(os.environ[FOLDER_VARIABLE])).begin()


if __name__ == "sitecustomize":
    main()
