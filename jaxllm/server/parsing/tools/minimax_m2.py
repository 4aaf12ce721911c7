"""MiniMax M2: <invoke name="…"><parameter name="…">value</parameter></invoke>."""

from __future__ import annotations

from jaxllm.server.parsing.tagged_calls import TaggedCalls, Tags


class Parser(TaggedCalls):
    signs = ("<minimax:tool_call>",)
    special = ("<minimax:tool_call>",)
    tags = Tags(
        calls="<minimax:tool_call>",
        call='<invoke name="',
        named='">',
        key='<parameter name="',
        value='">',
        value_end="</parameter>",
        call_end="</invoke>",
        calls_end="</minimax:tool_call>",
    )
