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

    Args:
        models: the plan of each stage.
        loader: serves all loads; by default one of its own.
        files: the model's own, while they are open; None: each read opens them.

    Attributes:
        models: the plan of each stage.
    """

    def __init__(
        self,
        models: Sequence[ModelPlan],
        loader: weights.Loader | None = None,
        files: weights.ModelFiles | None = None,
    ):
        self.models = tuple(models)
        self._wishes = models[-1].wishes
        self._loader = loader or weights.Loader()
        self._files = files

    @property
    def rounds(self) -> bool:
        """Whether devices hold weights as plain numbers before they hold them in few bits."""
        return any(model.spec.formats for model in self.models)

    def check(self, source: weights.ModelFiles) -> None:
        """Raise ConfigError unless these weights fit the engine: from a checkpoint's headers and
        scales, or from the arrays' names, types and shapes."""
        weights.check(source, self.models[-1].outline, "auto")

    def read(
        self,
        source: weights.Model | None = None,
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
                source or self._files or self._wishes.directory,
                model.outline,
                "auto" if source else config.load_format,
                seed=config.seed,
                progress=progress,
                cache=self._wishes.weight_cache,
                before=before[len(arrays) :],
                loader=self._loader,
            )
            leaves, _ = weight_leaves(state)
            arrays += leaves
        return tuple(jax.block_until_ready(arrays))


def check_weights(model: ModelPlan, use_cache: bool = False) -> None:
    """Raise the ConfigError that reading the engine's own weights would raise. Weights that are
    kept are right, if the engine will `use_cache`."""
    wishes = model.wishes
    cache = None
    if use_cache:
        cache = wishes.weight_cache
    weights.check(wishes.files, model.outline, wishes.config.load_format, cache)


def keep_weights(config: EngineConfig) -> list[Path]:
    """Make the weights that an engine of this configuration would have, and keep them in its
    `weight_cache_dir`; returns where those of each stage are. All use the first stage's devices, in
    turn. Raises ConfigError when weights cannot be kept."""
    wishes = read_wishes(config)
    with wishes.files:
        reserve_as(wishes.config)
        model = plan_model(wishes, [make_mesh(config.tensor_parallel_size)])
        check_weights(model)
        loader = weights.Loader()
        outlines = map(model.outline.at, stages(model.stage.count))
        return [
            _keep(replace(model, stage=outline.stage, outline=outline), loader)
            for outline in outlines
        ]


def _keep(model: ModelPlan, loader: weights.Loader) -> Path:
    """Keep the weights of one stage; returns where."""
    wishes = model.wishes
    entry = weights.kept_entry(wishes.files, model.outline, wishes.weight_cache)
    if entry is None:
        raise ConfigError(
            "weights of 16 bits are served as they are; name a --quantization or a checkpoint "
            "that is quantised"
        )
    WeightSource([model], loader, wishes.files).read()
    if not entry.folder.is_dir():
        raise ConfigError("the weights are not kept; the line above says why")
    return entry.folder
