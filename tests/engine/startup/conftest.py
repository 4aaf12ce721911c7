"""What tests of a start share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import jax
import pytest

from jaxllm.engine.startup import device_client


@pytest.fixture
def cuda_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with JAX's CUDA plugin on which no platform was chosen and no client exists."""
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(
        device_client, "entry_points", lambda group: [plugin] if group == "jax_plugins" else []
    )
    before = jax.config.jax_platforms, jax.config.jax_pjrt_client_create_options
    jax.config.update("jax_platforms", None)
    jax.config.update("jax_pjrt_client_create_options", None)
    yield
    jax.config.update("jax_platforms", before[0])
    jax.config.update("jax_pjrt_client_create_options", before[1])
