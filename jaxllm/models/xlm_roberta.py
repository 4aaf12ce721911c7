"""XLM-RoBERTa: RoBERTa over many languages, under its names."""

from __future__ import annotations

from jaxllm.models import roberta

DEFAULTS = roberta.DEFAULTS
ENCODES = True
NAMES = roberta.NAMES
IGNORED = roberta.IGNORED
spec = roberta.spec
classifier = roberta.classifier
build = roberta.build
