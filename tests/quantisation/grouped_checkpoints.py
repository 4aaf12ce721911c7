"""Matrices in the words of AWQ, GPTQ and compressed-tensors, with the weights that their libraries
make of them, number by number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word


class Made(NamedTuple):
    """Settings, stored tensors of the module X, and its weight [N, K]."""

    settings: dict[str, Any]
    stored: dict[str, np.ndarray]
    weight: np.ndarray


class Grouped(NamedTuple):
    """Numbers [N, K], scales and zero points [N, G], and the group of each column."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return (self.numbers - zeros).astype(np.float32) * scales.astype(np.float32)


def grouped(
    shape: tuple[int, int],
    group: int,
    bits: int = 4,
    zero: int | None = None,
    shuffled: bool = False,
) -> Grouped:
    """Random numbers; zero points are `zero`, or random too."""
    rng, (rows, columns) = np.random.default_rng(0), shape
    groups = (rows, -(-columns // group))
    scales = rng.uniform(0.01, 0.1, groups).astype(np.float16)
    zeros = rng.integers(1, 1 << bits, groups) if zero is None else np.full(groups, zero)
    of = np.arange(columns) // group
    numbers = rng.integers(0, 1 << bits, shape)
    return Grouped(numbers, scales, zeros, rng.permutation(of) if shuffled else of)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Numbers of each row in int32 words, the last ones filled up with zeros."""
    if bits == 3:
        return _words_of_3_bits(numbers)
    each = 32 // bits
    full = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each)))
    out = np.zeros((len(full), full.shape[1] // each), np.uint32)
    for i, column in enumerate(order or range(each)):
        out |= full[:, column::each].astype(np.uint32) << np.uint32(bits * i)
    return out.view(np.int32)


def _words_of_3_bits(numbers: np.ndarray) -> np.ndarray:
    """32 numbers in three words: ten whole ones in each, and two that are cut at bits 30 and 31."""
    full = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32))).astype(np.uint64)
    out = np.zeros((len(full), full.shape[1] // 32, 3), np.uint64)
    whole = ((0, 0, 0), (1, 11, 1), (2, 22, 2))  # word, first number, first bit
    for block in range(out.shape[1]):
        own = full[:, 32 * block : 32 * block + 32]
        for word, first, bit in whole:
            for i in range(10):
                out[:, block, word] |= own[:, first + i] << np.uint64(3 * i + bit)
        out[:, block, 0] |= (own[:, 10] << np.uint64(30)) & np.uint64(0xFFFFFFFF)
        out[:, block, 1] |= own[:, 10] >> np.uint64(2)
        out[:, block, 1] |= (own[:, 21] << np.uint64(31)) & np.uint64(0xFFFFFFFF)
        out[:, block, 2] |= own[:, 21] >> np.uint64(1)
    return out.reshape(len(full), -1).astype(np.uint32).view(np.int32)


def awq(shape: tuple[int, int], group: int = -1) -> Made:
    made = grouped(shape, shape[1] if group == -1 else group)
    stored = {
        "X.qweight": words(made.numbers.T, 4, AWQ_ORDER),
        "X.qzeros": words(made.zeros.T, 4, AWQ_ORDER),
        "X.scales": made.scales.T.copy(),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Made(settings, stored, made.weight)


def awq_gemv(shape: tuple[int, int], group: int = -1) -> Made:
    """The version whose words hold columns, filled up as those of `words`."""
    made = grouped(shape, shape[1] if group == -1 else group)
    groups, alike = made.scales.shape[1], {64: 2, 32: 4}.get(group, 1)
    width = 8 * alike * -(-groups // (8 * alike))
    filled = [np.pad(each, ((0, 0), (0, width - groups))) for each in (made.zeros, made.scales)]
    stored = {
        "X.qweight": words(made.numbers, 4),
        "X.qzeros": words(filled[0], 4),
        "X.scales": filled[1],
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"}
    return Made(settings, stored, made.weight)


def gptq(
    shape: tuple[int, int],
    group: int = -1,
    bits: int = 4,
    form: str = "gptq",
    shuffled: bool = False,
    index: bool = True,
    centred: bool = False,
) -> Made:
    zero = 1 << (bits - 1) if centred else None
    made = grouped(shape, shape[1] if group == -1 else group, bits, zero, shuffled)
    less = 1 if form == "gptq" else 0
    stored = {
        "X.qweight": words(made.numbers, bits).T.copy(),
        "X.qzeros": words((made.zeros - less).T, bits),
        "X.scales": made.scales.T.copy(),
    }
    if index:
        stored["X.g_idx"] = made.group_of.astype(np.int32)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": shuffled,
        "checkpoint_format": form,
        "sym": centred,
    }
    return Made(settings, stored, made.weight)


def pack_quantized(
    shape: tuple[int, int],
    group: int | None = None,
    bits: int = 4,
    symmetric: bool = True,
    shuffled: bool = False,
) -> Made:
    half = 1 << (bits - 1)
    made = grouped(shape, group or shape[1], bits, half if symmetric else None, shuffled)
    stored = {
        "X.weight_packed": words(made.numbers, bits),
        "X.weight_scale": made.scales,
        "X.weight_shape": np.array(shape, np.int64),
    }
    if not symmetric:
        stored["X.weight_zero_point"] = words(made.zeros.T, bits).T.copy()
    if shuffled:
        stored["X.weight_g_idx"] = made.group_of.astype(np.int32)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Made(settings, stored, made.weight)


def auto_round(made: Made, packing: str) -> Made:
    """The same tensors as auto-round says it."""
    settings = {key: made.settings[key] for key in ("bits", "group_size")}
    return made._replace(
        settings=settings | {"quant_method": "auto-round", "packing_format": packing, "sym": False}
    )


MADE = {
    "awq": awq((16, 24), 8),
    "awq, a last group cut off": awq((16, 40), 16),
    "awq, one group": awq((24, 16)),
    "awq gemv": awq_gemv((5, 24), 8),
    "awq gemv, a last group cut off": awq_gemv((7, 40), 16),
    "awq gemv, groups of 32": awq_gemv((9, 96), 32),
    "awq gemv, groups of 64": awq_gemv((3, 704), 64),
    "awq gemv, one group": awq_gemv((24, 16)),
    "gptq": gptq((16, 24), 8),
    "gptq v2": gptq((16, 24), 8, form="gptq_v2"),
    "gptq, groups in no order": gptq((16, 32), 8, shuffled=True),
    "gptq v2 of 8 bits, groups in no order": gptq((12, 24), 8, 8, "gptq_v2", shuffled=True),
    "gptq of 8 bits": gptq((12, 24), 8, 8),
    "gptq of 3 bits": gptq((32, 64), 16, 3),
    "gptq v2 of 3 bits, groups in no order": gptq((64, 32), 8, 3, "gptq_v2", shuffled=True),
    "gptq of 2 bits, one group": gptq((16, 32), -1, 2, index=False),
    "pack-quantized": pack_quantized((5, 24), 8),
    "pack-quantized, words cut off": pack_quantized((5, 13), 8),
    "pack-quantized, rows and words cut off": pack_quantized((9, 21), 16, symmetric=False),
    "pack-quantized with zero points": pack_quantized((5, 24), 8, symmetric=False),
    "pack-quantized of 8 bits, one group": pack_quantized((6, 20), None, 8),
    "pack-quantized, groups in no order": pack_quantized((8, 24), 8, shuffled=True),
    "auto-round": auto_round(gptq((16, 24), 8, form="gptq_v2"), "auto_round"),
    "auto-round as gptq": auto_round(gptq((16, 24), 8), "auto_round:auto_gptq"),
    "auto-round as awq": auto_round(awq((16, 24), 8), "auto_round:auto_awq"),
}
