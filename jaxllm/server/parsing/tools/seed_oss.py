"""Seed OSS: as Qwen 3 Coder, with other outer tags."""

from __future__ import annotations

from jaxllm.server.parsing.tagged_calls import TaggedCalls, Tags


class Parser(TaggedCalls):
    signs = ("<seed:tool_call>", "<function=", "<parameter=")
    special = ("<seed:tool_call>",)
    tags = Tags(
        calls="<seed:tool_call>",
        call="<function=",
        named=">",
        key="<parameter=",
        value=">",
        value_end="</parameter>",
        call_end="</function>",
        calls_end="</seed:tool_call>",
        lines=True,
    )
