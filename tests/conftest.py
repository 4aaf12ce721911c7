"""What every test shares: eight virtual CPU devices unless a platform is chosen, and a compilation
cache between runs."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator

import hypothesis
import pytest

from tests.memory_maps import release
from tests.thinned import thin, try_fewer

# A first call compiles, and machines are busy
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# Tracing makes objects that live: Python's own first threshold looks at them again and again
GARBAGE = (10_000, 10, 10)
QUICK_ROOMS = ("sampling", "server", "grammar", "weights")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache" / "tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
FLAGS = {
    "xla_force_host_platform_device_count": 8,
    # The threads of eight devices take turns on few, busy cores
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
if "cuda" not in os.environ["JAX_PLATFORMS"]:
    # Tests compile for longer than they compute, and this halves it
    FLAGS["xla_backend_optimization_level"] = 0
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [given, *(f"--{name}={value}" for name, value in FLAGS.items() if name not in given)]
).strip()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The length of soaks. The setting `timeout` is accepted where pytest-timeout is not installed:
    the GPU tests need pytest and hypothesis only."""
    parser.addoption(
        "--soak-minutes",
        type=float,
        default=1.0,
        help="of the soaks of a server; 30 before a release",
    )
    parser.addoption(
        "--soak-rate",
        type=float,
        default=float("inf"),
        help="requests a second of the soaks, at most",
    )
    parser.addoption(
        "--soak-steps",
        type=int,
        default=10_000,
        help="of the soak of an engine over two devices; 100000 before a release",
    )
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; read by pytest-timeout")


def pytest_configure() -> None:
    """Collect garbage more seldom than Python does by itself."""
    gc.set_threshold(*GARBAGE)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The rooms whose files take seconds come last, so that workers end together; tests that need a
    GPU are skipped where jax was not told to use one."""
    thin(items)
    if "not slow" in config.option.markexpr:
        try_fewer(items)
    items.sort(key=lambda item: item.path.parent.name in QUICK_ROOMS)
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu"))


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """A process has room for the executables of the next module."""
    yield
    release()


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of the repository."""
    return pathlib.Path(__file__).parents[1]
