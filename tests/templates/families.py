"""Chat templates that behave as those of well-known families do, and what each shows."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

TEMPLATES: dict[str, str] = {}
# Members of the traits that are not the defaults
EXPECTED: dict[str, dict[str, Any]] = {}

# Arguments are added to a string; calls only where the content is null; system texts in front
TEMPLATES["deepseek_v3"] = """
{%- set ns = namespace(system='', in_calls=false) -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = ns.system + '\\n\\n' + message['content'] if ns.system else message['content'] -%}
{%- endif -%}
{%- endfor -%}
<bos>{{ ns.system }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<|User|>{{ message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none -%}
<|Assistant|><|calls|>
{%- for call in message['tool_calls'] -%}
{{- '<|call|>' + call['type'] + '<|sep|>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '<|end_call|>' -}}
{%- endfor -%}
<|end_calls|>
{%- elif message['role'] == 'assistant' -%}<|Assistant|>{{ message['content'] }}<eos>
{%- elif message['role'] == 'tool' -%}<|output|>{{ message['content'] }}<|end_output|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|>{%- endif -%}"""
EXPECTED["deepseek_v3"] = {"objects": False, "contents": ("null",), "beside_calls": "apart"}

# Arguments are added to a string; a text beside calls is shown
TEMPLATES["deepseek_v31"] = """
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}
{%- elif message.role == 'user' -%}<|User|>{{ message.content }}
{%- elif message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is not none -%}
{{- '<|Assistant|></think>' + (message.content or '') + '<|calls|>' -}}
{%- for call in message.tool_calls -%}
{{- '<|call|>' + call.function.name + '<|sep|>' + call.function.arguments + '<|end_call|>' -}}
{%- endfor -%}
{{- '<|end_calls|><eos>' -}}
{%- elif message.role == 'assistant' -%}<|Assistant|></think>{{ message.content }}<eos>
{%- elif message.role == 'tool' -%}<|output|>{{ message.content }}<|end_output|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{%- endif -%}"""
EXPECTED["deepseek_v31"] = {"objects": False}

# Calls only where there is no content at all; arguments written with ~, which takes anything
TEMPLATES["deepseek_r1"] = """
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}
{%- elif message.role == 'user' -%}<|User|>{{ message.content }}
{%- elif message.role == 'assistant' and message.content is not defined -%}
<|Assistant|>
{%- for call in message.tool_calls -%}
<|call|>{{ call.function.name ~ '\\n```json\\n' ~ call.function.arguments ~ '\\n```' }}<|end_call|>
{%- endfor -%}
{%- elif message.role == 'assistant' -%}<|Assistant|>{{ message.content.split('</think>')[-1] }}<eos>
{%- elif message.role == 'tool' -%}<|output|>{{ message.content }}<|end_output|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|><think>{%- endif -%}"""
EXPECTED["deepseek_r1"] = {"objects": False, "contents": ("absent",), "beside_calls": "apart"}

# One call a message, whose text is not shown; an id is not needed
TEMPLATES["llama_31"] = """
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
<|head|>system<|end_head|>{{ system }}<|eot|>
{%- for tool in tools or [] -%}{{ tool | tojson(indent=4) }}{%- endfor -%}
{%- for message in messages -%}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) -%}
{{- '<|head|>' + message['role'] + '<|end_head|>\\n\\n' + message['content'] | trim + '<|eot|>' -}}
{%- elif 'tool_calls' in message -%}
{%- if message.tool_calls | length != 1 -%}
{{- raise_exception('This model only supports single tool-calls at once!') -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|head|>assistant<|end_head|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
{{- call.arguments | tojson -}}{{- '}<|eot|>' -}}
{%- else -%}
{{- '<|head|>ipython<|end_head|>\\n\\n' -}}
{{- message.content if message.content is string else message.content | tojson -}}{{- '<|eot|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|head|>assistant<|end_head|>\\n\\n' }}{%- endif -%}"""
EXPECTED["llama_31"] = {"several_calls": False, "beside_calls": "apart"}

# Several calls, a system message anywhere, objects and text
TEMPLATES["qwen_25"] = """
{%- if tools -%}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
{%- for tool in tools -%}{{ tool | tojson }}{%- endfor -%}<|im_end|>
{%- elif messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if message.content -%}{{ '\\n' + message.content }}{%- endif -%}
{%- for call in message.tool_calls -%}
{%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
EXPECTED["qwen_25"] = {}

# A system message comes first alone
TEMPLATES["qwen_35"] = """
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}
{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'user' -%}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' -}}
{{- value if value is string else value | tojson -}}{{- '\\n</parameter>\\n' -}}
{%- endfor -%}{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' -}}
{%- else -%}{{- raise_exception('Unexpected message role.') -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
EXPECTED["qwen_35"] = {
    "texts": False,
    "contents": ("empty",),
    "several_system": False,
    "late_system": False,
}

# Types of parameters are looked up, so that tools without a schema fail
TEMPLATES["qwen3_coder"] = """
{%- for tool in tools or [] -%}
{{- '<function><name>' + tool.function.name + '</name><description>' + tool.function.description | trim + '</description>' -}}
{%- for name, fields in tool.function.parameters.properties.items() -%}
<parameter><name>{{ name }}</name><type>{{ fields.type }}</type></parameter>
{%- endfor -%}
<required>{{ tool.function.parameters.required | tojson }}</required></function>
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' -}}
{%- endfor -%}</function></tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
EXPECTED["qwen3_coder"] = {"texts": False, "bare_tools": False}

# Turns alternate, ids have nine characters, the system's text is part of the user's first turn
TEMPLATES["mistral_v3"] = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set turns = messages -%}{%- endif -%}
{%- set ns = namespace(index=0) -%}
{%- for message in turns -%}
{%- if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) -%}
{%- if (message.role == 'user') != (ns.index % 2 == 0) -%}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- endfor -%}
<bos>
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + message.content + '[/INST]' -}}
{%- elif message.tool_calls is defined -%}
[TOOL_CALLS][
{%- for call in message.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 -%}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}
{%- endif -%}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}
{%- endfor -%}]<eos>
{%- elif message.role == 'assistant' -%}{{ ' ' + message.content + '<eos>' }}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 -%}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}
{%- endif -%}
[TOOL_RESULTS]{{ {'content': message.content, 'call_id': message.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- else -%}{{- raise_exception('Only user and assistant roles are supported') -}}{%- endif -%}
{%- endfor -%}"""
EXPECTED["mistral_v3"] = {
    "any_ids": False,
    "several_system": False,
    "late_system": False,
    "any_turns": False,
    "user_after_result": False,
    "user_after_calls": False,
    "any_opening": False,
    "results_alone": False,
}

# Values are added to strings, and results need a turn of the assistant behind them
TEMPLATES["seed"] = """
{%- set ns = namespace(open=false) -%}
{%- for message in messages -%}
{%- if ns.open and message.role == 'user' -%}{{ raise_exception('answer first') }}{%- endif -%}
{%- set ns.open = message.role == 'tool' -%}
{{- '<bos>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<call><function=' + call.function.name + '>' -}}
{%- for name in call.function.arguments -%}
{{- '<parameter=' + name + '>' + call.function.arguments[name] + '</parameter>' -}}
{%- endfor -%}</function></call>
{%- endfor -%}<eos>
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<bos>assistant\\n' }}{%- endif -%}"""
EXPECTED["seed"] = {
    "texts": False,
    "any_values": False,
    "contents": ("empty",),
    "user_after_result": False,
}

# Neither a system's message nor tools; turns alternate
TEMPLATES["gemma_2"] = """<bos>
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{{- '<start>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim + '<end>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start>model\\n' }}{%- endif -%}"""
EXPECTED["gemma_2"] = {
    "calls": False,
    "system": False,
    "several_system": False,
    "late_system": False,
    "any_turns": False,
    "results_alone": False,
    "any_opening": False,
}

# The system's text begins the user's first turn; other system messages are dropped
TEMPLATES["gemma_3"] = """<bos>
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{{- '<start>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{- (first if loop.first else '') + message.content | trim + '<end>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start>model\\n' }}{%- endif -%}"""
EXPECTED["gemma_3"] = {
    "calls": False,
    "several_system": False,
    "late_system": False,
    "any_turns": False,
    "results_alone": False,
    "any_opening": False,
}

# No calls; any role is shown
TEMPLATES["phi_4"] = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant<|im_sep|>{%- endif -%}"""
EXPECTED["phi_4"] = {"calls": False}

# Names and values in tags, by iterating over arguments; the result's tool is not needed
TEMPLATES["glm_45"] = """
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' -%}<|assistant|>
{%- if message.content.strip() -%}{{ '\\n' + message.content.strip() }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n<tool_call>' + call.name -}}
{%- set arguments = call.arguments -%}
{%- for name, value in arguments.items() -%}
<arg_key>{{ name }}</arg_key><arg_value>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- elif message.role == 'tool' -%}<|observation|><tool_response>{{ message.content }}</tool_response>
{%- elif message.role == 'system' -%}<|system|>
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
EXPECTED["glm_45"] = {"texts": False, "contents": ("empty",)}

# Arguments as text or an object; the tool's name is looked up
TEMPLATES["kimi_k2"] = """
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.get('name') or message.role }}<|im_middle|>
{%- if message.role == 'assistant' and message.tool_calls -%}
{{ message.content or '' }}<|calls|>
{%- for call in message.tool_calls -%}
<|call|>{{ call.id }}<|args|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}<|end_call|>
{%- endfor -%}<|end_calls|>
{%- elif message.role == 'tool' -%}{{ '## Return of ' + message.tool_call_id + '\\n' + message.content }}
{%- else -%}{{ message.content }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
EXPECTED["kimi_k2"] = {"names_in_ids": True}

# The first call alone is shown; a text beside it is a thought
TEMPLATES["gpt_oss"] = """
{%- set ns = namespace(last=none) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}<|start|>developer<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'user' -%}<|start|>user<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'assistant' and 'tool_calls' in message -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') -}}
{%- elif message.content or message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{%- set ns.last = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' -%}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' -%}
{%- if ns.last is none -%}{{ raise_exception('Message has tool role, but there was no previous call!') }}{%- endif -%}
<|start|>functions.{{ ns.last }} to=assistant<|message|>{{ message.content | tojson }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
EXPECTED["gpt_oss"] = {"several_calls": False, "results_alone": False}

# Calls are written only as a list beside no text; the result's message must have the tool's name
TEMPLATES["functionary"] = """
{%- for message in messages -%}
{%- if message.role == 'tool' and not message.name -%}
{{- raise_exception('A result needs the name of its tool.') -}}
{%- endif -%}
<|from|>{{ message.name if message.role == 'tool' else message.role }}
<|content|>
{%- if message.role == 'assistant' and message.tool_calls is defined -%}
{%- if message.content -%}{{ message.content }}
{%- else -%}
{%- for call in message.tool_calls -%}
<|recipient|>{{ call.function.name }}<|content|>{{ call.function.arguments }}<|stop|>
{%- endfor -%}
{%- endif -%}
{%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|from|>assistant{%- endif -%}"""
EXPECTED["functionary"] = {
    "objects": False,
    "beside_calls": "apart",
    "names_results": True,
    "results_alone": False,
}

# Members of an object are written one by one; system messages behind the first are dropped
TEMPLATES["minimax"] = """
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}]~!b[]~b]system
{{ message.content }}[e~[
{%- elif message.role == 'user' -%}]~b]user
{{ message.content }}[e~[
{%- elif message.role == 'assistant' -%}]~b]ai
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<invoke name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() -%}
<parameter name="{{ name }}">{{ value | tojson if value is not string else value }}</parameter>
{%- endfor -%}</invoke>
{%- endfor -%}[e~[
{%- elif message.role == 'tool' -%}]~b]tool
<response>{{ message.content }}</response>[e~[
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}]~b]ai
{% endif -%}"""
EXPECTED["minimax"] = {"texts": False, "several_system": False, "late_system": False}

# Calls are shown, and a text beside them is not; turns are free
TEMPLATES["granite"] = """
{%- for message in messages -%}
<|role|>{{ message.role }}<|end_role|>
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}<|tool_call|>{{ call.function | tojson }}{%- endfor -%}
{%- else -%}{{ message.content }}{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|role|>assistant<|end_role|>{%- endif -%}"""
EXPECTED["granite"] = {"beside_calls": "apart"}

# Everything is shown in any form
TEMPLATES["hermes"] = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
EXPECTED["hermes"] = {}

# Turns alternate, calls are an action beside a plan, results are documents
TEMPLATES["command_r"] = """
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}<|SYSTEM|>{{ message.content }}
{%- elif message.role == 'user' -%}<|USER|>{{ message.content }}
{%- elif message.role == 'assistant' -%}<|CHATBOT|>{{ message.content }}
{%- if message.tool_calls -%}<|ACTION|>[
{%- for call in message.tool_calls -%}
{"tool_name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor -%}]{%- endif -%}
{%- elif message.role == 'tool' -%}<|RESULT|>{{ message.content }}
{%- else -%}{{ raise_exception('There is no place for this role') }}{%- endif -%}<|END|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|CHATBOT|>{%- endif -%}"""
EXPECTED["command_r"] = {"several_system": False, "late_system": False}

# Objects are iterated over; a call needs a content that is a text
TEMPLATES["nemotron"] = """
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
<SPECIAL_10>System
{{ ns.system }}
{%- for tool in tools or [] -%}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<SPECIAL_11>User
{{ message.content }}
{%- elif message.role == 'tool' -%}<SPECIAL_11>User
<TOOL_RESPONSE>[{{ message.content | tojson }}]</TOOL_RESPONSE>
{%- elif message.role == 'assistant' -%}
{{- '<SPECIAL_11>Assistant\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
<TOOLCALL>{{ {'name': call.function.name} | tojson }}
{%- for name in call.function.arguments -%}{{ name }}={{ call.function.arguments[name] }};{%- endfor -%}
</TOOLCALL>
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<SPECIAL_11>Assistant
{% endif -%}"""
EXPECTED["nemotron"] = {
    "texts": False,
    "contents": ("empty",),
    "several_system": False,
    "late_system": False,
}

# Tools stand in the first message behind the system's, whoever said it
TEMPLATES["llama_33"] = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
<|head|>system<|end_head|>{{ system }}<|eot|>
{%- if tools -%}
{%- if not messages -%}{{- raise_exception('there is no first user message') -}}{%- endif -%}
<|head|>user<|end_head|>{{ tools | tojson }}{{ messages[0].content }}<|eot|>
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls is defined -%}
{%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call') -}}{%- endif -%}
<|head|>assistant<|end_head|>{{ message.tool_calls[0].function | tojson }}<|eot|>
{%- else -%}<|head|>{{ message.role }}<|end_head|>{{ message.content }}<|eot|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|head|>assistant<|end_head|>{%- endif -%}"""
EXPECTED["llama_33"] = {"several_calls": False, "beside_calls": "apart", "any_opening": False}

# Turns alternate, and an answer needs text or calls
TEMPLATES["devstral_2"] = """
{%- if messages[0].role == 'system' -%}
[SYSTEM]{{ messages[0].content }}[/SYSTEM]{%- set turns = messages[1:] -%}
{%- else -%}{%- set turns = messages -%}{%- endif -%}
{%- set ns = namespace(index=0) -%}
{%- for message in turns -%}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (ns.index % 2 == 0) -%}{{- raise_exception('take turns') -}}{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'assistant' -%}
{%- if not message.content and not message.tool_calls -%}{{- raise_exception('say something') -}}{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{%- endfor -%}<eos>
{%- elif message.role == 'tool' -%}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else -%}{{- raise_exception('no other role') -}}{%- endif -%}
{%- endfor -%}"""
EXPECTED["devstral_2"] = {
    "several_system": False,
    "late_system": False,
    "any_turns": False,
    "user_after_result": False,
    "user_after_calls": False,
    "empty_answers": False,
    "any_opening": False,
    "results_alone": False,
}

# A result needs calls before it, and a conversation the user
TEMPLATES["strict"] = """
{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}
{{- raise_exception('No user query found in messages.') -}}
{%- endif -%}
{%- set ns = namespace(called=false) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{%- set ns.called = message.tool_calls is defined -%}{%- endif -%}
{%- if message.role == 'tool' and not ns.called -%}{{- raise_exception('there was no call') -}}{%- endif -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}<call>{{ call.function | tojson }}</call>{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
EXPECTED["strict"] = {"results_alone": False, "any_opening": False}
