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
    config, model_dir, spec = read_model(config)
    reserve_as(config)
    meshes = [make_mesh(config.tensor_parallel_size)]
    setup = resolve(config, model_dir, meshes, spec)
    weights.check(model_dir, *setup.weights_for, config.load_format)
    return [_keep(replace(setup, stage=stage), config) for stage in stages(setup.stage.count)]


def _keep(setup: Setup, config: EngineConfig) -> Path:
    """Keep the weights of one stage; returns where."""
    directory, cache = Path(setup.resolved.model_dir), weight_cache(config)
    entry = weights.kept_entry(directory, *setup.weights_for, cache, setup.stage)
    if entry is None:
        raise ConfigError(
            "weights of 16 bits are served as they are; name a --quantization or a checkpoint "
            "that is quantised"
        )
    WeightSource([setup], config).read()
    if not entry.folder.is_dir():
        raise ConfigError("the weights are not kept; the line above says why")
    return entry.folder
