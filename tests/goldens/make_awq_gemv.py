"""Matrices as AutoAWQ packs them in the version "gemv": `awq_gemv.npz`.

Run in an interpreter with torch and AutoAWQ (0.2.9 made the file; its module alone is enough):
python tests/goldens/make_awq_gemv.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from awq.modules.linear.gemv import WQLinear_GEMV

# Rows, columns, columns of a group: words of zero points are filled up in twos or fours for small
# groups
CASES = {
    "groups of 128": (8, 384, 128),
    "groups of 128, more than a word of them": (8, 1280, 128),
    "groups of 64": (24, 192, 64),
    "groups of 32": (16, 352, 32),
}


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for seed, (name, (rows, columns, group)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        groups = (rows, columns // group)
        scales = (torch.rand(groups) * 0.01 + 0.002).half()
        zeros = torch.randint(0, 16, groups)
        numbers = torch.randint(0, 16, (rows, columns))
        spread = [each.repeat_interleave(group, 1).float() for each in (scales, zeros)]
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = (numbers - spread[1]) * spread[0]
        made = WQLinear_GEMV.from_linear(linear, 4, group, False, scales.float(), zeros.float())
        leaves = {leaf: getattr(made, leaf).numpy() for leaf in ("qweight", "qzeros", "scales")}
        found |= {f"{name}/{leaf}": array for leaf, array in leaves.items()}
        found[f"{name}/plain"] = linear.weight.data.numpy()
        found[f"{name}/group"] = np.array(group)
    np.savez_compressed(Path(__file__).with_name("awq_gemv.npz"), **found)


if __name__ == "__main__":
    main()
