"""Matrices of 8 bits, and of 4 in bytes, as compressed-tensors stores them: `compressed.npz`.

Run in an interpreter with torch and compressed-tensors (0.20.0 made the file):
python tests/goldens/make_compressed.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

SHAPE = (33, 80)
FOUR = {"num_bits": 4, "type": "int"}
CASES = {
    "one scale": {"type": "float", "strategy": "tensor"},
    "scales of rows": {"type": "float", "strategy": "channel"},
    "scales of blocks": {"type": "float", "strategy": "block", "block_structure": [16, 32]},
    "integers, scales of rows": {"type": "int", "strategy": "channel"},
    "integers, scales of groups": {"type": "int", "strategy": "group", "group_size": 16},
    "integers with zero points": {"type": "int", "strategy": "channel", "symmetric": False},
    "4 bits, scales of groups": FOUR | {"strategy": "group", "group_size": 16},
    "4 bits, scales of rows": FOUR | {"strategy": "channel"},
    "4 bits with zero points": FOUR | {"strategy": "group", "group_size": 40, "symmetric": False},
}


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest weight under each scale."""
    rows, columns = {
        "tensor": weight.shape,
        "channel": (1, weight.shape[1]),
        "group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    padded = torch.nn.functional.pad(
        weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    )
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (low.reshape(1), high.reshape(1)) if args.strategy == "tensor" else (low, high)


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for seed, (name, settings) in enumerate(CASES.items()):
        settings = settings | {"num_bits": settings.get("num_bits", 8)}
        args = QuantizationArgs(**settings)
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) + 0.1
        scale, zero = calculate_qparams(*extremes(weight, args), args)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        stored = NaiveQuantizationCompressor.compress(given, scheme)
        plain = NaiveQuantizationCompressor.decompress(stored, scheme)["weight"]
        for leaf, tensor in stored.items():
            bits = tensor.dtype.itemsize == 1
            found[f"{name}/{leaf}"] = (tensor.view(torch.uint8) if bits else tensor).numpy()
        found[f"{name}/plain"] = plain.float().numpy()
        found[f"{name}/settings"] = np.array(json.dumps(settings))
    np.savez_compressed(Path(__file__).with_name("compressed.npz"), **found)


if __name__ == "__main__":
    main()
