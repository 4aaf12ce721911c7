"""Decisions of a start without weights, programs or a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.config import EngineConfig, Resolved
from jaxllm.engine.startup.lattice import Lattice, plan_lattice
from jaxllm.engine.startup.memory_plan import MemoryPlan, first_plan
from jaxllm.engine.startup.model_plan import ModelPlan, plan_model
from jaxllm.engine.startup.wishes import Wishes
from jaxllm.mesh import make_mesh
from jaxllm.models import Wish, read_spec


class Decided(NamedTuple):
    """What a start decides before it compiles."""

    model: ModelPlan
    memory: MemoryPlan
    lattice: Lattice

    @property
    def resolved(self) -> Resolved:
        """What the engine would read."""
        return self.lattice.resolved


def decide(
    config: EngineConfig, directory: str | Path, meshes: Sequence[Mesh] | None = None
) -> Decided:
    """The decisions for a model directory, by default on one device. Raises ConfigError."""
    spec = read_spec(directory, Wish.of(config))
    wishes = Wishes(config, weights.ModelFiles(directory), spec)
    model = plan_model(wishes, meshes or [make_mesh(1)])
    return with_memory(model, first_plan(model))


def with_memory(model: ModelPlan, memory: MemoryPlan) -> Decided:
    """The decisions with these pools."""
    return Decided(model, memory, plan_lattice(model, memory))
