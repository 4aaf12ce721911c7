"""Makes gguf_blocks.npz: random blocks of each quantised type, and the numbers that the gguf
package of llama.cpp makes of them.

Needs gguf, which the tests do not: `python tests/goldens/make_gguf_blocks.py`.
"""

from __future__ import annotations

import pathlib

import gguf
import numpy as np

ROWS, BLOCKS = 2, 3
# Where a block has float16 numbers, whose random bytes could be infinite
FLOATS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def main() -> None:
    rng, found = np.random.default_rng(0), {}
    for name, places in FLOATS.items():
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (ROWS, BLOCKS, size), np.uint8)
        for at in places:
            floats = rng.normal(size=(ROWS, BLOCKS, 1)).astype(np.float16)
            blocks[..., at : at + 2] = floats.view(np.uint8)
        if name == "MXFP4":  # exponents of finite numbers
            blocks[..., 0] = rng.integers(0, 250, (ROWS, BLOCKS))
        rows = blocks.reshape(ROWS, -1)
        found[f"{kind.value}_blocks"] = rows
        found[f"{kind.value}_values"] = gguf.quants.dequantize(rows, kind)
    np.savez_compressed(pathlib.Path(__file__).parent / "gguf_blocks.npz", **found)


if __name__ == "__main__":
    main()
