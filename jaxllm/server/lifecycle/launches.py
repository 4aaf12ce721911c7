"""What each engine process of a model is started with: its devices, and a configuration in which
nothing is another engine's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.kv_transfer.settings import KVTransferSettings
from jaxllm.server.command_line.options import Options

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Launch:
    """One engine process. `devices` are the numbers of the GPUs that it sees, as
    CUDA_VISIBLE_DEVICES takes them; None: those that this process sees."""

    config: EngineConfig
    devices: str | None

    def command(self, engine: tuple[str, ...]) -> tuple[str, ...]:
        """The command that starts it."""
        if self.devices is None:
            return engine
        return ("env", f"{DEVICES}={self.devices}", *engine)


def engine_launches(options: Options, model_dir: Path) -> list[Launch]:
    """One for each engine of the model. Raises ConfigError when there are too few devices."""
    config = dataclasses.replace(options.config, model=str(model_dir))
    count = options.data_parallel_size
    if count == 1:
        return [Launch(config, options.visible_devices)]
    configs = [of_engine(config, number) for number in range(count)]
    visible = options.visible_devices or options.inherited_devices
    if visible == "":  # no GPU is to be seen
        return [Launch(engine_config, None) for engine_config in configs]
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    devices = devices_of_engines(visible, count, size)
    return [Launch(*pair) for pair in zip(configs, devices, strict=True)]


def devices_of_engines(visible: str | None, engines: int, per_engine: int) -> list[str]:
    """The devices of each engine, in the order of `visible`; None: of their numbers. Raises
    ConfigError."""
    needed = engines * per_engine
    if visible is None:
        devices = list(map(str, range(needed)))
    else:
        devices = visible.split(",")
    if len(devices) < needed:
        raise ConfigError(
            f"--data-parallel-size {engines} with {per_engine} devices each needs {needed} "
            f"devices, but {len(devices)} are visible ({visible}); lower it, or raise "
            "--visible-devices"
        )
    return [",".join(devices[first : first + per_engine]) for first in range(0, needed, per_engine)]


def of_engine(config: EngineConfig, number: int) -> EngineConfig:
    """The configuration of one of several engines: traces go into a directory of its own, and KV
    events to addresses of its own. Raises ConfigError."""
    transfer = KVTransferSettings.read(config.kv_transfer_config)
    if transfer is not None and transfer.sends:
        raise ConfigError(
            f"--kv-transfer-config: engines of --data-parallel-size fetch pages and send none, and "
            f"kv_role is {transfer.kv_role}; set it to kv_consumer, or start a server for each"
        )
    engine_config = config
    if config.profiler_dir is not None:
        traces = f"{config.profiler_dir}/engine-{number}"
        engine_config = dataclasses.replace(engine_config, profiler_dir=traces)
    events = KVEventSettings.read(config.kv_events_config)
    if events is not None:
        addresses = events.of_engine(number).config
        engine_config = dataclasses.replace(engine_config, kv_events_config=addresses)
    return engine_config
