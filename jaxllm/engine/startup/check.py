"""Whether a configuration fits a machine: what a start decides before it loads or compiles."""

from __future__ import annotations

from jaxllm import weights
from jaxllm.config import EngineConfig
from jaxllm.engine.startup.device_client import reserve_as
from jaxllm.engine.startup.report import Rows, decided_rows
from jaxllm.engine.startup.resolve import resolve
from jaxllm.engine.startup.sizing import with_workspace
from jaxllm.engine.startup.start import read_model
from jaxllm.mesh import make_stage_meshes


def check_fit(config: EngineConfig) -> Rows:
    """The decisions of a start, by an estimate of the largest step where a start would measure it.
    Raises ConfigError when it cannot work."""
    config, files, spec = read_model(config)
    with files:
        reserve_as(config)
        meshes = make_stage_meshes(config.tensor_parallel_size, config.pipeline_parallel_size)
        setup = resolve(config, files, meshes, spec)
        weights.check(files, setup.outline, config.load_format)
    if not setup.memory.budget.shared:  # where steps are compiled, an estimate refuses nothing
        setup = with_workspace(setup, config, setup.memory.budget.workspace)
    return decided_rows(setup, None)
