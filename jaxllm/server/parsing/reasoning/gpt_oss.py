"""gpt-oss: the analysis channel is reasoning. For requests without tools; else `tools/gpt_oss.py`
reads the channels."""

from __future__ import annotations

from jaxllm.server.parsing.harmony import CHANNEL, MESSAGE, START, Harmony
from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(Harmony, ReasoningParser):
    aliases = ("openai", "openai_gptoss", "harmony")
    signs = (CHANNEL, MESSAGE)
    special = (CHANNEL, MESSAGE)
    starts = (f"{CHANNEL}analysis{MESSAGE}",)
    ends = ("<|end|>",)
    between = f"{START}assistant"
    reply = f"{CHANNEL}final{MESSAGE}"
