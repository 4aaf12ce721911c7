"""XLM-RoBERTa: RoBERTa over many languages, under its names."""

from __future__ import annotations

from jaxllm.models import roberta

DEFAULTS, ENCODES, NAMES, IGNORED = roberta.DEFAULTS, True, roberta.NAMES, roberta.IGNORED
spec, classifier, build = roberta.spec, roberta.classifier, roberta.build
