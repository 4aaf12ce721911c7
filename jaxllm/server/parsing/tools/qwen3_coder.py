"""Qwen 3 Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from jaxllm.server.parsing.tagged_calls import TaggedCalls, Tags


class Parser(TaggedCalls):
    aliases = ("qwen3_xml", "qwen3coder", "qwen3_5")
    signs = ("<tool_call>", "<function=", "<parameter=")
    tags = Tags(
        calls="<tool_call>",
        call="<function=",
        named=">",
        key="<parameter=",
        value=">",
        value_end="</parameter>",
        call_end="</function>",
        calls_end="</tool_call>",
        lines=True,
    )
