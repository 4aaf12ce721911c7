"""Products whose inputs are rounded to 8 bits as compressed-tensors rounds them: `rounded.npz`.

Run in an interpreter with torch and compressed-tensors (0.20.0 made the file):
python tests/goldens/make_rounded.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

TOKENS, COLUMNS, ROWS = 7, 200, 33  # a group is cut off
GROUP = 128
GIVEN = 0.02
FLOAT, INT = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
# The inputs' settings; weights have a scale for each row, or for each group of columns
CASES = {
    "fp8 token": FLOAT | {"strategy": "token", "dynamic": True},
    "fp8 group": FLOAT | {"strategy": "group", "group_size": GROUP, "dynamic": True},
    "fp8 given": FLOAT | {"strategy": "tensor"},
    "int8 token": INT | {"strategy": "token", "dynamic": True},
    "int8 given": INT | {"strategy": "tensor"},
    "int8 shifted": INT | {"strategy": "token", "dynamic": True, "symmetric": False},
}


def both(
    x: torch.Tensor,
    args: QuantizationArgs,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Numbers, and the values that they stand for."""
    zero = torch.zeros_like(scale) if zero is None else zero
    numbers = quantize(x, scale, zero, args, dtype=args.pytorch_dtype())
    return numbers, dequantize(numbers, scale, zero, args=args, dtype=torch.float32)


def by_rows(x: torch.Tensor, settings: dict) -> tuple[torch.Tensor, ...]:
    """Numbers, values and scales `[rows, 1]` of one for each row."""
    args = QuantizationArgs(**(settings | {"strategy": "channel", "dynamic": False}))
    scale, _ = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), args)
    return *both(x, args, scale), scale


def by_groups(x: torch.Tensor, settings: dict) -> list[torch.Tensor]:
    """The same of one for each group of columns of a row."""
    groups = (by_rows(x[:, at : at + GROUP], settings) for at in range(0, x.shape[1], GROUP))
    return [torch.cat(part, 1) for part in zip(*groups, strict=True)]


def rounded(x: torch.Tensor, settings: dict) -> tuple[torch.Tensor, ...]:
    """The inputs' numbers, values and scales."""
    if settings["strategy"] == "token":
        args = QuantizationArgs(**settings)
        scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
        scale, zero = scale.reshape(-1, 1), zero.reshape(-1, 1)
        if not args.symmetric:
            numbers, values = both(x, args, scale, zero)
            return numbers.to(torch.int16) - zero.to(torch.int16), values, scale
        if settings["type"] == "int":  # vLLM's, over 127; the library's own is over 127.5
            scale = scale * 127.5 / 127
        return *both(x, args, scale), scale
    scale = torch.full((1,), GIVEN)
    return *both(x, QuantizationArgs(**settings), scale), scale


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for seed, (name, settings) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((TOKENS, COLUMNS), generator=generator)
        x[1, 3] = 60.0
        if not settings.get("symmetric", True):
            x[2] = x[2].abs() + 1  # 0 is in range all the same
        w = torch.randn((ROWS, COLUMNS), generator=generator) * COLUMNS**-0.5
        plain = {key: settings[key] for key in ("num_bits", "type")}
        if settings["strategy"] == "group":
            parts = [by_groups(each, plain) for each in (x, w)]
        else:
            parts = [[*rounded(x, settings)], [*by_rows(w, plain)]]
        (x_numbers, x_values, x_scale), (w_numbers, w_values, w_scale) = parts
        made = {
            "x": x,
            "x_numbers": x_numbers.view(torch.uint8) if x_numbers.itemsize == 1 else x_numbers,
            "x_scale": x_scale,
            "w_numbers": w_numbers.view(torch.uint8),
            "w_scale": w_scale,
            "y": x_values.double() @ w_values.double().T,
        }
        found |= {f"{name}/{leaf}": tensor.numpy() for leaf, tensor in made.items()}
        found[f"{name}/settings"] = np.array(json.dumps(settings))
    np.savez_compressed(Path(__file__).with_name("rounded.npz"), **found)


if __name__ == "__main__":
    main()
