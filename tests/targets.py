"""What tests choose kernels for, without a device: a target by the back end of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pallas_kernels.target import PORTABLE, Target
from tests.engine.runtime.cards import CARDS

H200 = CARDS["h200"].offer
A100 = CARDS["a100"].offer
RTX_5090 = CARDS["rtx-5090"].offer
TPU = Target("tpu")
TARGETS: Mapping[str, Target] = MappingProxyType(
    {"mosaic_gpu": H200, "mosaic_tpu": TPU, "xla": A100, "reference": PORTABLE}
)
