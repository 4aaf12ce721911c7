"""Gemma 3 that also sees: the language model inside it. Images are not read."""

from __future__ import annotations

from jaxllm.models import gemma3_text
from jaxllm.models.config.read import text_part
from jaxllm.models.config.transformer import WRAPPER_PREFIXES

DEFAULTS, NAMES = gemma3_text.DEFAULTS, gemma3_text.NAMES
PREFIXES = WRAPPER_PREFIXES
read, spec, build = text_part, gemma3_text.spec, gemma3_text.build
