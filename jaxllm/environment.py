"""The fingerprint of a machine, for bug reports and benchmark results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jaxllm

PACKAGES = (
    *(
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "libtpu",
        "flax",
        "orbax-checkpoint",
        "numpy",
        "ml_dtypes",
    ),
    *(
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "starlette",
        "uvicorn",
        "msgspec",
        "orjson",
    ),
)


def fingerprint() -> dict[str, Any]:
    """Versions, processor and devices. Starts the JAX back end.

    The memory of a device is in bytes, None where unknown.
    """
    import jax

    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return {
        "jaxllm": jaxllm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cpu_cores": cores,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "devices": [
            {
                "kind": d.device_kind,
                "platform": d.platform,
                "memory": (d.memory_stats() or {}).get("bytes_limit"),
            }
            for d in jax.devices()
        ],
    }


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The processor's model name from the operating system."""
    path = Path(cpuinfo)
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()
    else:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    return platform.processor() or platform.machine()
