"""GLM 4.5 to 4.7: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"""

from __future__ import annotations

from jaxllm.server.parsing.tagged_calls import TaggedCalls, Tags


class Parser(TaggedCalls):
    aliases = ("glm46", "glm47", "glm4_moe", "glm47_moe")
    signs = ("<tool_call>", "<arg_key>")
    special = ("<tool_call>",)
    tags = Tags(
        calls="<tool_call>",
        call="",
        named="",
        key="<arg_key>",
        value="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
        calls_end="",
        breaks=("\n", ""),  # of GLM 4.5 and 4.6, and of 4.7
    )
