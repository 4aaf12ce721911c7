"""The directory that keeps lowered and compiled programs between starts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import jax

from jaxllm.config import ConfigError
from jaxllm.engine.runtime.compilation.exports import is_private

FOLDER = "programs"  # in the compilation cache's directory


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
    drop_empty(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def drop_empty(folder: Path) -> None:
    """Delete the programs that a full disk took nothing of: JAX can neither read nor replace them,
    and would compile them at every start."""
    for entry in folder.glob("*-cache"):
        with suppress(OSError):  # a read-only one stays
            if entry.stat().st_size == 0:
                entry.unlink()


def programs_folder() -> Path | None:
    """Where lowered programs are kept, beside XLA's own cache; None where that is no local
    directory."""
    cache = jax.config.jax_compilation_cache_dir
    if cache and "://" not in cache:
        return Path(cache) / FOLDER
    return None
