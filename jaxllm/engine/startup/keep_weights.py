"""Weights in few bits made once, for later starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.device_client import reserve_as
from jaxllm.engine.startup.resolve import Setup, resolve
from jaxllm.engine.startup.start import WeightSource, read_model, weight_cache
from jaxllm.mesh import make_mesh, stages


def keep_weights(config: EngineConfig) -> list[Path]:
    """Make the weights that an engine of this configuration would have, and keep them in its
    `weight_cache_dir`; returns where those of each stage are. All use the first stage's devices, in
    turn. Raises ConfigError when weights cannot be kept."""
    config, files, spec = read_model(config)
    with files:
        reserve_as(config)
        meshes = [make_mesh(config.tensor_parallel_size)]
        setup = resolve(config, files, meshes, spec)
        weights.check(files, setup.outline, config.load_format)
        loader = weights.Loader()
        return [
            _keep(
                replace(setup, stage=stage, outline=setup.outline.at(stage)), config, files, loader
            )
            for stage in stages(setup.stage.count)
        ]


def _keep(
    setup: Setup, config: EngineConfig, files: weights.ModelFiles, loader: weights.Loader
) -> Path:
    """Keep the weights of one stage; returns where."""
    entry = weights.kept_entry(files, setup.outline, weight_cache(config))
    if entry is None:
        raise ConfigError(
            "weights of 16 bits are served as they are; name a --quantization or a checkpoint "
            "that is quantised"
        )
    WeightSource([setup], config, loader, files).read()
    if not entry.folder.is_dir():
        raise ConfigError("the weights are not kept; the line above says why")
    return entry.folder
