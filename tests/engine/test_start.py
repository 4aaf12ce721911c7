"""Bringing an engine up: what the device's client is told before it exists."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import pytest

from jaxllm.config import ConfigError
from jaxllm.engine import start
from jaxllm.engine.start import may_use_cuda, reserve_memory, use_compilation_cache


@pytest.fixture
def cuda_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with JAX's CUDA plugin on which no platform was chosen and no client exists."""
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(start, "entry_points", lambda group: [plugin] if group == "jax_plugins" else [])
    before = jax.config.jax_platforms, jax.config.jax_pjrt_client_create_options
    jax.config.update("jax_platforms", None)
    jax.config.update("jax_pjrt_client_create_options", None)
    yield
    jax.config.update("jax_platforms", before[0])
    jax.config.update("jax_pjrt_client_create_options", before[1])


@pytest.mark.usefixtures("cuda_installed")
@pytest.mark.parametrize("platforms", [None, "cuda", "cuda,cpu"])
def test_a_cuda_client_is_told_its_share(platforms: str | None) -> None:
    jax.config.update("jax_platforms", platforms)
    reserve_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.9}


@pytest.mark.usefixtures("cuda_installed")
def test_another_share_in_the_same_process_is_refused() -> None:
    reserve_memory(0.9)
    reserve_memory(0.9)
    with pytest.raises(ConfigError, match="has taken its share"):
        reserve_memory(0.5)


@pytest.mark.usefixtures("cuda_installed")
@pytest.mark.parametrize("platforms", ["cpu", "tpu,cpu"])
def test_other_platforms_clients_get_no_options_that_they_do_not_know(platforms: str) -> None:
    jax.config.update("jax_platforms", platforms)
    reserve_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options is None


def test_without_the_cuda_plugin_there_is_no_cuda(cuda_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "entry_points", lambda group: [])
    assert not may_use_cuda()


def test_a_cache_that_others_may_write_to_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        use_compilation_cache(str(tmp_path))
