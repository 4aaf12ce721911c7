"""`MemoryPlan`: the pools of KV pages on one device, fitted to what the largest step needs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.kv_requirements import (
    KVRequirements,
    fitting_length,
    pool_pages,
    size_flag,
)
from jaxllm.engine.startup.limits import may_shorten
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.remedies import Smaller, crowded, too_large, too_small

# One part of it, of what pages may have, may go unused: a pool that was compiled for stays
UNUSED_SHARE = 100
# One part of it, of what pages may have, is kept beside the likely step: a step that needs more
# than the pool left would have every program made again
MARGIN_SHARE = 250


@dataclass(frozen=True)
class MemoryPlan:
    """The pools on one device.

    Attributes:
        budget: what the pools' size comes from.
        need: what the pools serve, for the longest sequence that was decided.
        num_pages: of the first cache group.
        kv_bytes: of all KV pages.
    """

    budget: MemoryBudget
    need: KVRequirements
    num_pages: int
    kv_bytes: int

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.need.max_model_len

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Pages of each cache group."""
        return self.need.group_pages(self.num_pages)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step may take: what weights, buffers that stay and pages leave."""
        budget = self.budget
        return budget.usable - budget.weights - budget.resident - budget.staged - self.kv_bytes

    @property
    def is_likely(self) -> bool:
        """Whether the pools leave the budget's largest step its room; not those before any step is
        known."""
        return self.kv_bytes <= self.budget.for_pages

    def suits(self, step: int) -> bool:
        """Whether the pools are right for a step that needs `step` bytes: the room for it is enough
        and wastes little."""
        room = self.budget.workspace
        most = step + self.budget.for_pages // UNUSED_SHARE
        return self.is_likely and step <= room <= most

    def takes(self, step: int) -> bool:
        """Whether a step that needs `step` bytes fits beside the pages. What it takes of the host's
        own memory is not counted."""
        return self.budget.shared or step <= self.step_bytes


class Measure(Protocol):
    """Tells what the largest step needs on one device, in bytes beside weights, pages and slot
    state. The need does not depend on the pools. Of several hosts all ask alike."""

    def expected(self, model: ModelPlan, plan: MemoryPlan) -> int:
        """The need before programs of the right pools exist; those of `plan` are a guess."""

    def compiled(self, plan: MemoryPlan) -> int:
        """The need of the programs of these pools, which are compiled then; 0 where none are."""

    def keep(self, step: int) -> None:
        """Keep the need that pools were sized by for later starts."""


def fit(model: ModelPlan, plan: MemoryPlan, measure: Measure) -> MemoryPlan:
    """The pools that the largest step leaves memory for, or that were asked for, from the first
    plan on.

    A step that needs more when it is compiled than was expected sizes them once more, on all hosts
    together. Raises ConfigError, with what helps, when a longest request or the step has no room.
    """
    agree = model.wishes.hosts.agree
    is_sized = is_measured(model)
    if is_sized:
        step = max(agree(measure.expected(model, plan)))
        plan = _confirmed(plan, step, measure) or _sized(model, step, measure)
    step = max(agree(measure.compiled(plan)))
    if is_sized and not plan.takes(step):
        plan = _sized(model, step, measure)
        step = max(agree(measure.compiled(plan)))
    if not plan.takes(step):
        budget = replace(plan.budget, workspace=step)
        smaller = _smaller(model, measure)
        raise ConfigError(crowded(model.config, budget, plan.need, plan.num_pages, smaller))
    return plan


def first_plan(model: ModelPlan) -> MemoryPlan:
    """The plan before any step is compiled.

    Pools beside the likely step, and a margin, are most often right already. An estimate refuses
    nothing where steps are going to be compiled: the pools are then those of a step that needs
    nothing. Raises ConfigError as `plan_memory`.
    """
    if not _compiles(model):
        return estimated_plan(model)
    if model.likely_step is not None and is_measured(model):
        likely = replace(model.budget, workspace=model.likely_step)
        margin = max(0, likely.for_pages) // MARGIN_SHARE
        likely = replace(likely, workspace=likely.workspace + margin)
        with suppress(ConfigError):  # the step may need less
            return plan_memory(model.config, likely, model.need)
    least = replace(model.budget, workspace=0)
    return replace(plan_memory(model.config, least, model.need), budget=model.budget)


def estimated_plan(model: ModelPlan) -> MemoryPlan:
    """The plan by an estimate of the largest step. Raises ConfigError as `plan_memory`."""

    def smaller(tokens: int, seqs: int) -> MemoryBudget:
        return model.with_steps(tokens, seqs).budget

    return plan_memory(model.config, model.budget, model.need, smaller)


def is_measured(model: ModelPlan) -> bool:
    """Whether the pools get what a compiled step leaves. Elsewhere the estimate holds, or the size
    that was asked for."""
    return _compiles(model) and size_flag(model.config) is None


def _compiles(model: ModelPlan) -> bool:
    """Whether steps are compiled before they run, for a device with memory of its own."""
    return not model.budget.shared and not model.config.enforce_eager


def _sized(model: ModelPlan, step: int, measure: Measure) -> MemoryPlan:
    """The plan with pools beside a step that needs `step` bytes."""
    budget = replace(model.budget, workspace=step)
    plan = plan_memory(model.config, budget, model.need, _smaller(model, measure))
    measure.keep(step)
    return plan


def _confirmed(plan: MemoryPlan, step: int, measure: Measure) -> MemoryPlan | None:
    """The plan, if its pools are right for a step that needs `step` bytes."""
    if not plan.suits(step):
        return None
    measure.keep(plan.budget.workspace)
    return plan


def _smaller(model: ModelPlan, measure: Measure) -> Smaller:
    """Budgets of smaller steps, as `measure` finds them."""

    def smaller(tokens: int, seqs: int) -> MemoryBudget:
        trial = model.with_steps(tokens, seqs)
        pages = trial.need.pages_per_request
        plan = MemoryPlan(trial.budget, trial.need, pages, trial.need.bytes_of(pages))
        step = max(model.wishes.hosts.agree(measure.expected(trial, plan)))
        return replace(trial.budget, workspace=step)

    return smaller


def plan_memory(
    config: EngineConfig,
    budget: MemoryBudget,
    need: KVRequirements,
    smaller: Smaller | None = None,
) -> MemoryPlan:
    """Pages for the pools, where `need` is for the longest sequence that was asked for.

    Raises ConfigError with needed and available GiB, the longest length that fits, and the flags
    that help; `smaller` gives the budgets of smaller steps.
    """
    if may_shorten(config):
        need = replace(need, max_model_len=max(1, fitting_length(config, budget, need)))
    pages = pool_pages(config, budget, need)
    size = need.bytes_of(pages)
    if pages and size > budget.for_pages:
        raise ConfigError(too_large(config, budget, need, pages, smaller))
    if pages < need.pages_per_request:
        raise ConfigError(too_small(config, budget, need, pages, smaller))
    return MemoryPlan(budget, need.at_length(need.max_model_len), pages, size)
