"""A host that follows: it starts the same engine as the controller, then does what that tells."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.join import joined
from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.replay import replay
from jaxllm.engine.scheduling.plan import Moves
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.runners import Running
from jaxllm.engine.startup.started import start
from jaxllm.engine.startup.weight_source import WeightSource
from jaxllm.hosts.follower import Follower

# Devices that wait for those of another host may notice its end before its connection tells
WORD_SECONDS = 2.0


def follow(config: EngineConfig, report: Report | None = None) -> None:
    """Follow the controller until it stops in order. Raises ConfigError when this host does not fit
    the group or its start fails."""
    with joined(config) as hosts:
        assert isinstance(hosts, Follower), "the host of rank 0 leads"
        own = replace(config, skip_tokenizer_init=True)  # texts are the controller's
        parts = start(own, report or Report(), hosts=hosts)
        devices = Devices(parts.runner, parts.weights, parts.give_back)
        for command in hosts.commands():
            try:
                replay(command, devices)
            except Exception:
                hosts.hear_out(WORD_SECONDS)
                raise


class Devices:
    """This host's devices, as a `Replayer`."""

    def __init__(
        self,
        runner: Running,
        source: WeightSource,
        give_back: Callable[[], None] = lambda: None,
    ):
        self._runner = runner
        self._source = source
        self._give_back = give_back
        self._asleep = False

    def run(self, launch: Launch) -> None:
        """Dispatch programs; nobody reads their results here."""
        self._runner.run(launch)

    def move(self, moves: Moves) -> None:
        """Move pages. Raises RuntimeError when some did not reach host memory: the controller
        relies on every host's."""
        self._runner.move(moves)
        if self._runner.lost():
            raise RuntimeError("KV pages did not reach host memory; see the warning in its log")

    def reset(self) -> None:
        """As of `Dispatcher`."""
        self._runner.reset()

    def sleep(self, level: int) -> None:
        """As of `Sleeper`."""
        self._runner.sleep(level)
        self._asleep = True
        gc.collect()  # arrays in cycles hold memory too
        self._give_back()

    def wake_up(self) -> None:
        """As of `Dispatcher`."""
        self._runner.wake_up()
        self._asleep = False

    def update_weights(self, directory: str | None) -> None:
        """Have the weights in a directory, or the engine's own, read again; awake in place of those
        of now."""
        keep = not self._source.rounds
        before = () if self._asleep else self._runner.release(keep_pages=keep)
        path = None if directory is None else Path(directory)
        self._runner.wake_up(self._source.read(path, before=before))
        self._asleep = False
