"""JAX's profiler on a running engine. Traces open in XProf, TensorBoard and Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxllm.config import ConfigError


class Profiler:
    """Starts and stops traces into one directory; None if the operator gave none. A process has one
    trace at a time."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._running = False

    def start(self) -> None:
        """Start a trace. Raises ConfigError without a directory, while a trace runs, or if the
        directory cannot be written."""
        if self._directory is None:
            raise ConfigError(
                "there is no directory for profiles; give --profiler-dir (profiler_dir of LLM)"
            )
        if self._running:
            raise ConfigError("a profile is running already; stop it first")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call of a step would drown the step
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._directory, profiler_options=options)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot profile into {self._directory}: {error}") from None
        self._running = True

    def stop(self) -> None:
        """End the trace and write it, which takes seconds. Raises ConfigError when none is
        running."""
        if not self._running:
            raise ConfigError("no profile is running; start one first")
        self._running = False
        jax.profiler.stop_trace()
