"""The engine process: `python -m jaxllm.server.engine.process --fd N`. A reader thread feeds a
queue; the main loop handles messages between steps.

It ends when told to, when the HTTP process goes away (end of file), or when the engine fails
repeatedly.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxllm.cache.events import KVEvent, without_tokens
from jaxllm.commands import Profile, ResetPrefixCache, Sleep, UpdateWeights, WakeUp
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.profile import Profiler
from jaxllm.messages import GenerateRequest, PoolingRequest, RequestError, TextDelta
from jaxllm.sampling.values import OptionError
from jaxllm.server import logs
from jaxllm.server.engine.loading import AnyEngine, Factory, PhaseHeard, load, load_in_lines
from jaxllm.server.engine.outbox import Outbox
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Died,
    Frames,
    Inspect,
    Inspected,
    Outputs,
    Phase,
    Pool,
    Ready,
    Rejected,
    Start,
    StepFailed,
    Stop,
    ToEngine,
    ToServer,
    encode,
)
from jaxllm.server.errors import sanitize

logger = logging.getLogger("jaxllm.engine")

IDLE_SECONDS = 1.0  # without a message until an idle engine checks itself
CHECK_SECONDS = 60.0  # between two self-checks, at least
MAX_FAILED_STEPS = 3  # without a finished request in between
STEPS_IN_FLIGHT = 4  # at most
MAX_HANDLING = 20e-3  # seconds that waiting messages may delay the next step
REQUESTS_RUN = "requests are running; try again later, or add ?reset_running_requests=true"
PR_SET_PDEATHSIG = 1  # of prctl(2)
ORPHAN_GRACE = 20.0  # seconds for a step in progress after the HTTP process has gone


class GrammarReady:
    """In the queue of messages: a grammar that requests wait for is built."""


class ProgramMade:
    """In the queue of messages: one of the late programs is made, so the statistics changed."""


type Message = ToEngine | GrammarReady | ProgramMade | None  # None: the other side has gone


class EngineProcess:
    """The engine's side of the socket.

    `factory(config, on_phase)` makes the engine. `orphan(seconds)` is called when the other side
    has gone: this process must end within that time. It is 0 while the engine loads, because the
    next start needs the device.

    Attributes:
        inbox: messages that have arrived and are not handled.
    """

    def __init__(
        self,
        sock: socket.socket,
        factory: Factory,
        orphan: Callable[[float], None] = lambda _: None,
    ):
        self._sock = sock
        self._factory = factory
        self._orphan = orphan
        self._grace = 0.0
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._told_to_end = False
        # SimpleQueue.get may wait for ever for a timeout of a few µs (CPython 3.12)
        self.inbox: queue.Queue[Message] = queue.Queue()
        self._failed_steps = 0  # since a request last finished
        self._outbox = Outbox(sock)  # several threads report phases of the start
        self._profiler = Profiler(None)
        self._prefixes: list[KVEvent] = []  # not yet sent
        # Steps so far at the last self-check, and when it was (time.monotonic)
        self._checked = (0, -CHECK_SECONDS)

    def run(self) -> int:
        """Serve until the end; returns the exit status."""
        self._reader.start()
        try:
            engine = self._start()
            return 0 if engine is None else self._loop(engine)
        except ConfigError as error:
            return self._die(str(error), expected=True)
        except (BrokenPipeError, ConnectionResetError):
            return 1
        except Exception as error:
            logger.exception("the engine failed")
            return self._die(f"{type(error).__name__}: {error}")
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader thread
            self._sock.close()

    def _read(self) -> None:
        frames = Frames[ToEngine](ToEngine)
        try:
            while data := self._sock.recv(1 << 16):
                for message in frames.feed(data):
                    self._told_to_end |= isinstance(message, Stop)
                    self.inbox.put(message)
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError):
                logger.exception("the server sent a malformed message")
        self.inbox.put(None)
        self._orphan(self._grace)

    def _start(self) -> AnyEngine | None:
        first = self.inbox.get()
        if not isinstance(first, Start):
            return None
        self._profiler = Profiler(first.config.profiler_dir)
        engine = self._factory(first.config, lambda *phase: self._send(Phase(*phase)))
        if engine is None:
            self._grace = ORPHAN_GRACE  # nothing is left to do but to end
            return None
        # JAX's objects, a million or so, stay as long as the process: Python's collector would look
        # through them while streams wait.
        gc.collect()
        gc.freeze()
        engine.when_built(lambda: self.inbox.put(GrammarReady()))
        self._grace = ORPHAN_GRACE
        start = self._follow_prefixes(engine) if first.tells_prefixes else None
        self._send(Ready(engine.resolved, engine.stats(), start))
        engine.make_late(lambda: self.inbox.put(ProgramMade()))
        return engine

    def _follow_prefixes(self, engine: AnyEngine) -> bytes | None:
        """Collect what enters and leaves the prefix cache from now on. Returns where its hashes
        start; None when nothing is cached."""
        try:
            engine.scheduler.kv_manager.listen(
                lambda batch: self._prefixes.extend(map(without_tokens, batch.events))
            )
        except ValueError:
            return None
        return engine.scheduler.kv_manager.hash_start

    def _loop(self, engine: AnyEngine) -> int:
        """Serve until the other side says that this is the end, or has gone. Without its word other
        hosts of a group hear of a failure when this process ends."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._take_turns(engine)
        if not self._told_to_end:
            self._reader.join()  # the word may still be unread
        if not self._told_to_end:
            return 1
        engine.runner.leave()
        return 0

    def _take_turns(self, engine: AnyEngine) -> None:
        while True:
            for message in self.due_messages(engine):
                if message is None or isinstance(message, Stop):
                    return
                self._handle(engine, message)
            deltas = self._step(engine) if engine.has_work and not engine.awaits_grammar else []
            self._send_outputs(engine, deltas)

    def _send_outputs(self, engine: AnyEngine, deltas: list[TextDelta]) -> None:
        prefixes = self._prefixes
        self._prefixes = []
        self._send(Outputs(deltas, engine.stats(), prefixes))

    def _step(self, engine: AnyEngine) -> list[TextDelta]:
        """One step. A step that fails ends the engine's requests, and the engine starts over.

        Raises RuntimeError at the last of MAX_FAILED_STEPS without a finished request in between.
        """
        try:
            deltas = engine.step()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise RuntimeError(
                    f"{MAX_FAILED_STEPS} steps failed without a finished request in between; "
                    f"the last one: {type(error).__name__}: {error}"
                ) from error
            logger.exception("a step failed")
            self._send(StepFailed())
            return []
        if self._failed_steps and any(d.finish_reason in ("stop", "length") for d in deltas):
            self._failed_steps = 0
        return deltas

    def due_messages(self, engine: AnyEngine) -> Iterator[Message]:
        """The messages to handle before the next step; waits for one when the engine has no work.

        Messages left after MAX_HANDLING come after the step.
        """
        if engine.awaits_grammar:
            yield self.inbox.get()
        elif engine.has_work:
            yield from self.messages_until(time.monotonic() + engine.wait_seconds)
        else:
            yield from self._idle_messages(engine)
        until = time.monotonic() + MAX_HANDLING
        while not self.inbox.empty() and time.monotonic() < until:
            yield self.inbox.get()

    def messages_until(self, when: float) -> Iterator[Message]:
        """Messages as they arrive until `when` (time.monotonic) or until one ends the process."""
        with contextlib.suppress(queue.Empty):
            while (left := when - time.monotonic()) > 0:
                yield (message := self.inbox.get(timeout=left))
                if message is None or isinstance(message, Stop):
                    break

    def _idle_messages(self, engine: AnyEngine) -> list[Message]:
        """The next message, or none when the engine has work. An engine that stays idle after
        work checks itself."""
        steps, when = self._checked
        if engine.stats().steps != steps:
            try:
                return [
                    self.inbox.get(
                        timeout=max(IDLE_SECONDS, when + CHECK_SECONDS - time.monotonic())
                    )
                ]
            except queue.Empty:
                engine.self_check()
                self._checked = (engine.stats().steps, time.monotonic())
                self._send_outputs(engine, [])
        return [] if engine.has_work else [self.inbox.get()]

    def _handle(self, engine: AnyEngine, message: ToEngine | GrammarReady | ProgramMade) -> None:
        match message:
            case Abort(id):
                engine.abort(id)
            case Profile(start):
                self._send(Answered(self._profile(start)))
            case Inspect():
                self._send(Inspected(engine.watch.view()))
            case ResetPrefixCache() | Sleep() | WakeUp() | UpdateWeights():
                problem = self._change_memory(engine, message)
                self._send_outputs(engine, [])  # who hears the answer knows what has changed
                self._send(Answered(problem))
            case Add(request) | Pool(request):
                self._add(engine, request)

    def _add(self, engine: AnyEngine, request: GenerateRequest | PoolingRequest) -> None:
        try:
            engine.add(request)
        except (RequestError, OptionError) as error:
            code = getattr(error, "code", None)
            self._send(Rejected(request.id, str(error), error.param, code))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in native code, which must not end other requests
            logger.exception("a request was not taken")
            reason = "the engine could not take this request"
            self._send(Rejected(request.id, reason, None, "internal_error"))

    def _change_memory(
        self, engine: AnyEngine, message: ResetPrefixCache | Sleep | WakeUp | UpdateWeights
    ) -> str | None:
        """Forget prefixes, put the engine to sleep, wake it, or change its weights; returns the
        reason of a failure."""
        try:
            match message:
                case ResetPrefixCache(running):
                    return None if engine.reset_prefix_cache(running) else REQUESTS_RUN
                case Sleep(level):
                    for _ in range(STEPS_IN_FLIGHT):  # of requests that were aborted
                        if engine.has_work and not engine.awaits_grammar:
                            self._send_outputs(engine, self._step(engine))
                    engine.sleeper.sleep(level)
                case WakeUp():
                    engine.sleeper.wake_up()
                case UpdateWeights(directory):
                    assert directory is not None, "an operator names a checkpoint"
                    engine.sleeper.update_weights(Path(directory))
        except (ConfigError, ValueError) as error:
            return str(error)
        except Exception:
            logger.exception("memory could not be changed")
            return "the engine failed to do so; see the server's log"
        return None

    def _profile(self, start: bool) -> str | None:
        """Start or stop a trace between two steps; returns the reason of a failure."""
        try:
            self._profiler.start() if start else self._profiler.stop()
        except ConfigError as error:
            return str(error)
        except Exception:
            logger.exception("the profiler failed")
            return "the profiler failed; see the server's log"
        return None

    def _send(self, message: ToServer) -> None:
        self._outbox.send(encode(message))

    def _die(self, reason: str, expected: bool = False) -> int:
        with contextlib.suppress(OSError):
            self._send(Died(reason if expected else sanitize(reason), expected))
            self._outbox.flush()
        return 1


def die_with_parent(wanted: bool) -> None:
    """Whether Linux kills this process when its parent ends; elsewhere nothing changes."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0, 0, 0, 0)


def main(argv: list[str] | None = None, factory: Factory | None = None) -> int:
    """Entry of the process; the socket is inherited as a file descriptor."""
    parser = argparse.ArgumentParser(prog="jaxllm.server.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    sock = socket.socket(fileno=args.fd)
    logs.configure(args.log_level, args.log_format)
    make = factory or (load_in_lines if args.log_format == "json" else load)
    sock.set_inheritable(False)  # a child that outlives this process must not hold it open
    # Systemd sends them to every process of a service
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The HTTP process decides when this one ends, and lets requests finish before
        signal.signal(number, signal.SIG_IGN)

    def load_engine(config: EngineConfig, on_phase: PhaseHeard) -> AnyEngine | None:
        """While it loads, a library may hold Python's lock, and `orphan` would not run."""
        die_with_parent(True)
        engine = make(config, on_phase)
        die_with_parent(False)
        return engine

    def orphan(seconds: float) -> None:
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # this process is ending already
            timer.start()

    return EngineProcess(sock, load_engine, orphan).run()


if __name__ == "__main__":
    sys.exit(main())
