"""Matrices as auto-round packs them: like GPTQ's or AWQ's, as `packing_format` says. `extra_config`
names modules with other bits; those of 16 are plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.grouped import read_grouping
from jaxllm.quantisation.schemes.awq import GEMM, Awq
from jaxllm.quantisation.schemes.gptq import BITS, LESS, Gptq, is_centred

AWQ = "auto_round:auto_awq"
USUAL = "auto_round:auto_gptq"
# Older names of packings
OLDER = {"auto": USUAL, "auto_round:gptq": USUAL, "auto_round:awq": AWQ}
GPTQ = {
    USUAL: LESS["gptq"],
    "auto_round:gptqmodel": LESS["gptq_v2"],
    "auto_round": LESS["gptq_v2"],
}


class AutoRoundAwq(Awq):
    """AWQ's matrices."""

    method = "auto-round"


class AutoRoundGptq(Gptq):
    """GPTQ's matrices."""

    method = "auto-round"


def read(settings: Mapping[str, Any]) -> AutoRoundAwq | AutoRoundGptq:
    """The scheme of these settings. Raises ConfigError."""
    for key, plain in (("data_type", (None, "int")), ("act_bits", (None, 16, 32))):
        if settings.get(key) not in plain:
            raise ConfigError(
                f"{key} is {settings[key]!r:.40}; integers with inputs as they are, are read"
            )
    setting = settings.get("packing_format", USUAL)
    packing = None
    if isinstance(setting, str):
        packing = OLDER.get(setting, setting)
    if packing == AWQ:
        return AutoRoundAwq(read_grouping(settings, (4,)), GEMM)
    if packing not in GPTQ:
        known = ", ".join((AWQ, *GPTQ))
        packing = setting
        raise ConfigError(f"packing_format is {packing!r:.60}; {known} are read")
    grouping = read_grouping(settings, BITS, mixed="extra_config")
    return AutoRoundGptq(grouping, GPTQ[packing], False, is_centred(settings, "extra_config"))
