"""Those who see the steps of an engine and change nothing. Imports no jax."""

from __future__ import annotations

from jaxllm.engine.scheduling.plan import Plan


class StepObserver:
    """Sees steps. A subclass has the methods that it wants; none of them returns anything."""

    __slots__ = ()

    def step_launched(self, plan: Plan) -> None:
        """The forward of a step was launched."""

    def step_collected(self, plan: Plan) -> None:
        """The oldest step in flight was collected."""

    def steps_forgotten(self) -> None:
        """No step is in flight any more, because one has failed."""


class StepObservers(StepObserver):
    """Tells several observers, in their order."""

    def __init__(self, *observers: StepObserver):
        self._observers = observers

    def step_launched(self, plan: Plan) -> None:
        """As of `StepObserver`."""
        for observer in self._observers:
            observer.step_launched(plan)

    def step_collected(self, plan: Plan) -> None:
        """As of `StepObserver`."""
        for observer in self._observers:
            observer.step_collected(plan)

    def steps_forgotten(self) -> None:
        """As of `StepObserver`."""
        for observer in self._observers:
            observer.steps_forgotten()
