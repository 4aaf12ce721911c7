"""Matrices of 8-bit floats with exponents (MXFP8) as Model Optimizer and compressed-tensors store
and restore them: `mxfp8.npz`.

Run in an interpreter with torch, nvidia-modelopt (0.47.0 made the file) and compressed-tensors
(0.20.0): python tests/goldens/make_mxfp8.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import MXFP8QuantizationCompressor
from compressed_tensors.quantization.quant_scheme import MXFP8, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.quantization.qtensor import MXFP8QTensor

BLOCK = 32
SHAPES = {"whole blocks": (33, 96), "a last block cut off": (5, 80)}


def weight(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    """Rows of very different sizes, a block of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator)
    found *= torch.exp2(torch.randint(-30, 30, (shape[0], 1), generator=generator).float())
    found[1, :BLOCK] = 0
    return found


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        made, scale = MXFP8QTensor.quantize(weight(seed, shape))
        leaves = {"weight": made._quantized_data.view(torch.uint8), "weight_scale": scale}
        leaves["plain"] = made.dequantize(torch.float32, scale=scale)
        found |= {f"modelopt, {name}/{leaf}": each.numpy() for leaf, each in leaves.items()}
    given = weight(7, SHAPES["whole blocks"])
    given[1, :BLOCK] = 1  # its scale of zeros is no power of two
    blocks = given.reshape(len(given), -1, BLOCK)
    scheme = QuantizationScheme(targets=["Linear"], **MXFP8)
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), scheme.weights)
    state = {"weight": given, "weight_scale": scale, "weight_zero_point": zero}
    stored = MXFP8QuantizationCompressor.compress(state, scheme)
    plain = MXFP8QuantizationCompressor.decompress(stored, scheme)["weight"]
    leaves = {leaf: stored[leaf].view(torch.uint8) for leaf in ("weight", "weight_scale")}
    found |= {f"compressed-tensors/{leaf}": each.numpy() for leaf, each in leaves.items()}
    found["compressed-tensors/plain"] = plain.float().numpy()
    found["compressed-tensors/settings"] = np.array(scheme.model_dump_json())
    np.savez_compressed(Path(__file__).with_name("mxfp8.npz"), **found)


if __name__ == "__main__":
    main()
