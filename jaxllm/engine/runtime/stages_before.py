"""What a dispatcher has of the stages before its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from jax import Array

from jaxllm.engine.runtime.program import Key
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves

if TYPE_CHECKING:
    from jaxllm.engine.runtime.dispatch import Dispatcher

type Call = tuple[Key, np.ndarray | None]


class StagesBefore(Protocol):
    """The stages before the last one, as the dispatcher of the last one sees them: they do their
    part of everything first."""

    def catch_up(self, group: int) -> None:
        """Let stages of this process know the tokens of a group's last step, before its next."""

    def news(self, group: int) -> tuple[Call, ...]:
        """What others have yet to learn of a group's last step, as part of its next launch. Waits
        for it."""

    def drawn(self, group: int, tokens: Array) -> None:
        """A step of this group has drawn `tokens`, [2, Q] as `advance` takes them."""

    def inputs(
        self, key: Key, buffer: np.ndarray | None, last: Dispatcher
    ) -> tuple[Array, ...] | None:
        """Run a program on these stages, if it concerns them. Returns what it takes on the last
        stage, or None where it does not run there."""

    def move(self, moves: Moves) -> None:
        """Move what these layers have of the pages."""

    def lost(self) -> list[int]:
        """As of `PageSwapper`."""

    def fetches_done(self) -> bool:
        """As of `PageSwapper`."""

    def warm_up(self) -> list[Link]:
        """Run the programs that no step of the last stage runs; returns the links to host memory
        as measured."""

    def sleep(self, keep_weights: bool) -> None:
        """Free everything on the devices."""

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """Free everything but the weights, one stage's after another's."""

    def wake(self, weights: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        """Be as after the start; returns the weights of the last stage, if any are given."""

    def reset(self) -> None:
        """Slot state and pages anew after a step that failed."""


class NoStages:
    """`StagesBefore` of a model whose layers are on the same devices."""

    def catch_up(self, group: int) -> None:
        """Nobody has to."""

    def news(self, group: int) -> tuple[Call, ...]:
        """None."""
        return ()

    def drawn(self, group: int, tokens: Array) -> None:
        """The slots of the same devices have them."""

    def inputs(
        self, key: Key, buffer: np.ndarray | None, last: Dispatcher
    ) -> tuple[Array, ...] | None:
        """What the host brings."""
        return last.sent(key, buffer)

    def move(self, moves: Moves) -> None:
        """No other pages."""

    def lost(self) -> list[int]:
        """No other pages."""
        return []

    def fetches_done(self) -> bool:
        """No other pages."""
        return True

    def warm_up(self) -> list[Link]:
        """No other programs."""
        return []

    def sleep(self, keep_weights: bool) -> None:
        """No other devices."""

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """No other weights."""
        return ()

    def wake(self, weights: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        """All weights are those of the last stage."""
        return weights

    def reset(self) -> None:
        """No other state."""
