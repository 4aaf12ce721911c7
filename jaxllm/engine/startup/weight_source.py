"""Where weights come from, at a start and later, and what is kept of them for later starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.lattice import weight_leaves
from jaxllm.engine.startup.device_client import reserve_as
from jaxllm.engine.startup.model_plan import ModelPlan, plan_model
from jaxllm.engine.startup.wishes import read_wishes
from jaxllm.mesh import make_mesh, stages
from jaxllm.weights.load import Progress


class WeightSource:
    """Where the weights of some stages come from.

    Attributes:
        models: the plan of each stage.
    """

    def __init__(self, models: Sequence[ModelPlan]):
        self.models = tuple(models)
        self._wishes = models[-1].wishes

    @property
    def rounds(self) -> bool:
        """Whether devices hold weights as plain numbers before they hold them in few bits."""
        return any(model.spec.formats for model in self.models)

    def check(self, source: Path | weights.GivenArrays) -> None:
        """Raise ConfigError unless these weights fit the engine: from a checkpoint's headers and
        scales, or from the arrays' names, types and shapes."""
        weights.check(source, *self.models[-1].weights_for, "auto")

    def read(
        self,
        source: Path | weights.GivenArrays | None = None,
        progress: Progress | None = None,
        before: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, ...]:
        """The weights of a checkpoint or of arrays, by default the engine's own, one stage's after
        another's; all are on the devices. They are written into those of `before`, which are lost.
        Raises ConfigError."""
        config = self._wishes.config
        arrays: list[jax.Array] = []
        for model in self.models:
            _, state = weights.load(
                source or self._wishes.directory,
                *model.weights_for,
                "auto" if source else config.load_format,
                seed=config.seed,
                progress=progress,
                cache=self._wishes.weight_cache,
                stage=model.stage,
                before=before[len(arrays) :],
            )
            leaves, _ = weight_leaves(state)
            arrays += leaves
        return tuple(jax.block_until_ready(arrays))


def check_weights(model: ModelPlan, use_cache: bool = False) -> None:
    """Raise the ConfigError that reading the engine's own weights would raise. Weights that are
    kept are right, if the engine will `use_cache`."""
    wishes = model.wishes
    cache = wishes.weight_cache if use_cache else None
    weights.check(
        wishes.directory,
        *model.weights_for,
        wishes.config.load_format,
        cache,
        stages(model.stage.count),
    )


def keep_weights(config: EngineConfig) -> list[Path]:
    """Make the weights that an engine of this configuration would have, and keep them in its
    `weight_cache_dir`; returns where those of each stage are. All use the first stage's devices, in
    turn. Raises ConfigError when weights cannot be kept."""
    wishes = read_wishes(config)
    reserve_as(wishes.config)
    model = plan_model(wishes, [make_mesh(config.tensor_parallel_size)])
    check_weights(model)
    return [_keep(replace(model, stage=stage)) for stage in stages(model.stage.count)]


def _keep(model: ModelPlan) -> Path:
    """Keep the weights of one stage; returns where."""
    wishes = model.wishes
    entry = weights.kept_entry(
        wishes.directory, *model.weights_for, wishes.weight_cache, model.stage
    )
    if entry is None:
        raise ConfigError(
            "weights of 16 bits are served as they are; name a --quantization or a checkpoint "
            "that is quantised"
        )
    WeightSource([model]).read()
    if not entry.folder.is_dir():
        raise ConfigError("the weights are not kept; the line above says why")
    return entry.folder
