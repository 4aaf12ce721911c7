"""Gemma 3 that also sees: the language model inside it. Images are not read."""

from __future__ import annotations

from typing import Any

from jaxllm.models import gemma3_text
from jaxllm.models.config.read import Config, text_part
from jaxllm.models.config.transformer import WRAPPER_PREFIXES

DEFAULTS = gemma3_text.DEFAULTS
NAMES = gemma3_text.NAMES
PREFIXES = WRAPPER_PREFIXES
spec = gemma3_text.spec
build = gemma3_text.build


def read(hf: Config) -> dict[str, Any]:
    """The language model's configuration; inside this model its logits are never capped."""
    return {**text_part(hf), "final_logit_softcapping": None}
