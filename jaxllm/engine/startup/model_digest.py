"""What tells the pages of one model from another's, without reading all of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from jaxllm.config import EngineConfig, Resolved

HEAD = 1 << 20  # bytes of each file, with the names and shapes of its tensors
# evenly over each file, and bytes of each
SAMPLES = 256
SAMPLE = 4096


def prefix_root(config: EngineConfig, resolved: Resolved) -> bytes:
    """Digest of what two engines must share for their pages to be interchangeable. Where they
    exchange them, the model is what its files hold, wherever they lie."""
    transfers = config.kv_transfer_config is not None
    identity = {
        "model": model_digest(config, resolved) if transfers else resolved.model_dir,
        "dtype": resolved.dtype,
        "kv_dtype": resolved.kv_dtype,
        "page_size": resolved.page_size,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


def model_digest(config: EngineConfig, resolved: Resolved) -> str:
    """Digest of a model as it is loaded: its configuration, samples of its weights, and the options
    that change what is computed.

    Models of the same shapes differ in most of their weights, so samples tell them apart.
    """
    options = [config.load_format, config.quantization, config.hf_overrides, resolved.model_type]
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    if config.load_format == "dummy":
        digest.update(b";seed=%d" % config.seed)
    for path in _files(Path(resolved.model_dir)):
        size = path.stat().st_size
        digest.update(b";%d;" % size)
        with path.open("rb") as file:
            digest.update(file.read(HEAD))
            for number in range(SAMPLES if size > HEAD else 0):
                file.seek(size * number // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    """The files that decide what is computed, in the order of their names."""
    if model.is_file():
        return [model]
    weights = [path for end in ("safetensors", "gguf") for path in model.glob(f"*.{end}")]
    if weights:
        return [model / "config.json", *sorted(weights)]
    return [model / "config.json"]
