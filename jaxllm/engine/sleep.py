"""An idle engine gives its device memory to others and takes it again; weights change in place.

Compiled programs stay, so an engine that wakes compiles nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from traceback import clear_frames

import jax
from jax import Array

from jaxllm.commands import UpdateWeights
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.startup.started import Started
from jaxllm.mesh import lacks_memory
from jaxllm.messages import RequestError
from jaxllm.weights import GivenArrays, ModelFiles

LEVELS = (1, 2)
REMEDY = "POST /wake_up, or call LLM.wake_up()"


class Sleeper:
    """Whether an engine sleeps, and how it goes to sleep and wakes.

    `forget` drops all prefixes; `busy` says whether requests run; `shares_pages`, whether with
    other engines, which would not hear of other weights.

    Attributes:
        runner: whose memory is given away.
        source: of the weights.
        level: 0 while awake; 1: the weights lie in host memory; 2: they are dropped.
    """

    def __init__(
        self,
        parts: Started,
        forget: Callable[[], None],
        busy: Callable[[], bool],
        *,
        shares_pages: bool = False,
    ):
        assert not isinstance(parts.runner, StageFollower), "a host that follows is told to sleep"
        self.runner = parts.runner
        self.source = parts.weights
        self._give_back = parts.give_back
        self._forget = forget
        self._busy = busy
        self.level = 0
        self._shares_pages = shares_pages

    def check_awake(self) -> None:
        """Raise RequestError while the engine sleeps."""
        if self.level:
            raise RequestError(f"the model sleeps; {REMEDY}", None, "sleeping")

    def sleep(self, level: int) -> None:
        """Free KV pages, cached prefixes and weights; the last lie in host memory at level 1.

        Nothing happens to an engine that sleeps as deeply. Raises ValueError for another level, and
        while requests run.
        """
        if level not in LEVELS:
            raise ValueError(
                f"level must be 1 (weights to host memory) or 2 (dropped), got {level}"
            )
        self._refuse_now()
        if level <= self.level:
            return
        if self.level == 0:
            self._forget()
        self.runner.sleep(level)
        self.level = level
        gc.collect()  # arrays in cycles hold memory too
        self._give_back()

    def wake_up(self) -> None:
        """Take the memory again; nothing happens to an engine that is awake. Dropped weights are
        read again: raises ConfigError when they cannot be, and the engine sleeps on."""
        if self.level:
            if self.level == 2:
                self._read()
            else:
                self.runner.wake_up()
            self.level = 0

    def update_weights(self, given: Path | GivenArrays) -> None:
        """Take other weights of the same shapes, a checkpoint's or arrays, in place of those of
        now; cached prefixes are forgotten.

        Raises ValueError while requests run, where other engines share pages, and for arrays where
        other hosts would need them too; ConfigError when the weights do not fit. Those of before
        stay then, unless reading fails halfway, which leaves the engine asleep.
        """
        self._refuse_now()
        if self._shares_pages:
            raise ValueError(
                "an engine with --kv-transfer-config keeps its weights; start it anew with others"
            )
        if isinstance(given, GivenArrays) and jax.process_count() > 1:
            raise ValueError("arrays reach this host alone; give a path that every host can read")
        with ModelFiles(given) as files:
            self.source.check(files)
            if self.level == 0:
                self._overwrite(files)
            else:
                self.sleep(2)
                self._read(files)
        self.level = 0

    def _overwrite(self, files: ModelFiles) -> None:
        """Read weights into those of now. Beside weights that are rounded there nothing stays on
        the devices, which have no room for a plain one; the memory of a step is enough for others.
        To take a pool's memory away and give it back takes as long as half of the weights. A pool
        whose size the user has set may leave less: then nothing stays after all."""
        self._forget()
        keep = not self.source.rounds
        try:
            self._read(files, self.runner.release(keep_pages=keep))
            return
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold what was read
            self.sleep(2)
            if not (keep and lacks_memory(error)):
                raise
        self._read(files)

    def _read(self, files: ModelFiles | None = None, before: tuple[Array, ...] = ()) -> None:
        """Take the weights of open files, by default the engine's own."""
        if files is None:
            self.runner.tell(UpdateWeights(None))
        elif files.directory is not None:
            self.runner.tell(UpdateWeights(str(files.directory)))
        self.runner.wake_up(self.source.read(files, before=before))

    def _refuse_now(self) -> None:
        if self._busy():
            raise ValueError("requests are running; try again when they have finished")
