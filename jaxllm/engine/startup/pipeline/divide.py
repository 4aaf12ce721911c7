"""Whether the layers of a model can be divided into stages, and what does not go with that."""

from __future__ import annotations

from jaxllm.cache.layer import owner_of
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.mesh import Stage, stages
from jaxllm.models import ModelSpec


def divide(config: EngineConfig, spec: ModelSpec, max_num_seqs: int) -> tuple[Stage, ...]:
    """The stages of an engine, mostly one, which runs so many requests at once. Raises
    ConfigError."""
    count, layers = config.pipeline_parallel_size, len(spec.layers)
    if count == 1:
        return stages(1)
    refused = {
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "a pooling model": spec.pooling is not None,
    }
    if found := [what for what, given in refused.items() if given]:
        raise ConfigError(
            f"{found[0]} does not go with --pipeline-parallel-size yet; leave out one of them"
        )
    if count > layers:
        raise ConfigError(
            f"--pipeline-parallel-size {count} is more than the {layers} layers of the model; "
            f"set it to at most {layers}"
        )
    if max_num_seqs < count:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} leaves stages without requests; set it to at "
            f"least --pipeline-parallel-size ({count})"
        )
    divided = stages(count)
    for stage in divided:
        _check_shared(spec, stage)
    return divided


def _check_shared(spec: ModelSpec, stage: Stage) -> None:
    """Raise ConfigError where a layer of the stage reads keys of a layer before it."""
    layers = stage.layers(len(spec.layers))
    for layer in layers:
        owner = owner_of(spec.layers, layer)
        if owner not in layers:
            raise ConfigError(
                f"--pipeline-parallel-size {stage.count}: layer {layer} would be in another stage "
                f"than layer {owner}, whose keys it reads; choose another number of stages"
            )
