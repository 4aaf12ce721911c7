"""Settings of JAX that must stand before it opens a device."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import jax

from jaxllm.config import ConfigError
from jaxllm.engine.runtime.compilation.exports import is_private


def use_compilation_cache(directory: str | None) -> None:
    """Keep executables between runs in a directory that its owner alone can read. A directory that
    JAX was already given stays.

    Raises ConfigError when a directory that was asked for cannot be used.
    """
    if jax.config.jax_compilation_cache_dir and directory is None:
        return
    try:
        path = Path(directory or "~/.cache/jaxllm/xla").expanduser()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(path):
            raise OSError(None, "others may write to it, and what lies in it is run (chmod go-w)")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, or no home
        if directory is None:
            return  # costs time only
        trouble = getattr(error, "strerror", error)
        raise ConfigError(
            f"--compilation-cache-dir {directory} cannot be used: {trouble}"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def reserve_memory(fraction: float) -> None:
    """Set the share of device memory that JAX's NVIDIA client takes when it is made. Clients of
    other platforms have no such option.

    Raises ConfigError when an engine in this process has set another share.
    """
    if not may_use_cuda():
        return
    before = jax.config.jax_pjrt_client_create_options
    wanted = {"memory_fraction": fraction}
    if before and before != wanted:
        raise ConfigError(
            f"this process has taken its share of the device's memory already ({before}); "
            "use the same gpu_memory_utilization, or a process of its own"
        )
    jax.config.update("jax_pjrt_client_create_options", wanted)


def may_use_cuda() -> bool:
    """Whether JAX will try NVIDIA GPUs: its CUDA plugin is installed, and no other platform was
    chosen."""
    asked = jax.config.jax_platforms
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))
