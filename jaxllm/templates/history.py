"""Messages in the form that a chat template shows, by its traits. What becomes of a message depends
on those up to it, and of calls on their results: a conversation that grows keeps its beginning."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.templates.arguments import check_depth, object_of, text_of, understood
from jaxllm.templates.traits import CONTENTS, EMPTY_SCHEMA, TemplateTraits, id_with_name

type Message = dict[str, Any]

_NINE = re.compile(r"[a-zA-Z0-9]{9}").fullmatch
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def shaped_input(arguments: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """Arguments of `apply_chat_template` with messages and tools as the template shows them. Raises
    TemplateError on calls that no template can render."""
    continues = arguments["continue_final_message"]
    shaped = {"conversation": shaped_messages(arguments["conversation"], traits, continues)}
    if arguments["tools"] and not traits.bare_tools:
        shaped["tools"] = [_filled(tool) for tool in arguments["tools"]]
    return arguments | shaped


def shaped_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits, continues: bool = False
) -> list[Message]:
    """The messages as the template shows them. Raises TemplateError on arguments of calls that nest
    too deeply. `continues`: the last message is to be continued, and stays even if it is empty."""
    # A content without value is the caller's as well as an absent one
    shaped: Iterable[Message] = (
        {name: value for name, value in message.items() if name != "content" or value is not None}
        for message in messages
    )
    shaped = (_with_arguments(message, traits) for message in shaped)
    if not traits.results_alone:
        shaped = _lone_results_told(shaped, traits)
    shaped = _systems_placed(shaped, traits)
    if not traits.empty_answers:
        shaped = _empty_answers_dropped(list(shaped), continues)
    if not traits.any_opening:
        shaped = _opened(shaped)
    if not traits.several_calls:
        shaped = _one_call_each(list(shaped))
    if not traits.user_after_calls:
        shaped = _calls_answered(shaped)
    if traits.names_in_ids:
        shaped = _ids_with_names(shaped)
    if not traits.any_ids:
        shaped = map(_with_short_ids, shaped)
    if traits.names_results:
        shaped = _named_results(shaped)
    if traits.calls:
        shaped = _contents_shown(shaped, traits)
    return _neighbours_joined(shaped, traits)


# Arguments


def _with_arguments(message: Message, traits: TemplateTraits) -> Message:
    """A message whose calls have arguments in the template's form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)) or not calls:
        return message
    return message | {"tool_calls": [_call_with_arguments(call, traits) for call in calls]}


def _call_with_arguments(call: Any, traits: TemplateTraits) -> Any:
    function = _function_of(call)
    if "arguments" not in function:
        return call
    shaped = {**function, "arguments": arguments_for(function["arguments"], traits)}
    if "function" in call:
        return {**call, "function": shaped}
    return shaped


def _function_of(call: Any) -> Mapping[str, Any]:
    """The name and the arguments of a call, which may stand in it without a "function" around
    them; nothing for what is no call."""
    function = None
    if isinstance(call, Mapping):
        function = call.get("function", call)
    if isinstance(function, Mapping):
        return function
    return {}


def arguments_for(arguments: Any, traits: TemplateTraits) -> Any:
    """The arguments of one call, which are a text or a value, as the template shows them: the
    client's own text, or an object. Raises TemplateError on those that nest too deeply."""
    if isinstance(arguments, dict):
        check_depth(arguments)
    only_texts = traits.texts and not traits.objects
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, dict):
        text = _as_text(arguments)
        value = None
        if not only_texts:
            value = object_of(text)
        if value is None and traits.texts:
            return text
        if value is None:
            arguments = understood(text)
        else:
            arguments = value
    elif only_texts:
        return text_of(arguments)
    if traits.any_values:
        return arguments
    return {name: _as_text(member) for name, member in arguments.items()}


def _as_text(value: Any) -> str:
    """A text as it is, another value as JSON."""
    if isinstance(value, str):
        return value
    return text_of(value)


# System messages


def _systems_placed(messages: Iterable[Message], traits: TemplateTraits) -> Iterator[Message]:
    """System messages that the template does not show become text of the user's turn that follows,
    or a turn of their own, behind all results of a call."""
    waiting: list[Any] = []  # contents
    leading: list[Message] = []
    begun = False  # whether a message was no system message
    for message in messages:
        if message["role"] == "system":
            if begun:
                shown = traits.late_system
            else:
                shown = traits.system
            if not shown:
                waiting.append(message.get("content"))
            elif begun:
                yield message
            else:
                leading.append(message)
            continue
        if not begun:
            yield from _led(leading, traits)
            begun = True
        if waiting and message["role"] == "user":
            message = message | {"content": joined([*waiting, message.get("content")])}
            waiting = []
        elif waiting and message["role"] != "tool":
            yield {"role": "user", "content": joined(waiting)}
            waiting = []
        yield message
    if not begun:
        yield from _led(leading, traits)
    if waiting:
        yield {"role": "user", "content": joined(waiting)}


def _led(leading: list[Message], traits: TemplateTraits) -> Iterator[Message]:
    """The system messages that come first, as one where the template shows no second."""
    if len(leading) < 2 or traits.several_system:
        yield from leading
    else:
        yield leading[0] | {"content": joined([message.get("content") for message in leading])}


def joined(contents: Sequence[Any]) -> Any:
    """Contents of several messages as one: text, or parts where one of them has parts."""
    contents = [content for content in contents if content]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        if parts:
            parts.append({"type": "text", "text": "\n\n"})
        if isinstance(content, str):
            parts.append({"type": "text", "text": content})
        else:
            parts += content
    return parts


# Calls and their results


def _lone_results_told(messages: Iterable[Message], traits: TemplateTraits) -> Iterator[Message]:
    """Results that no message of calls comes before, as turns of the user."""
    calling = False
    for message in messages:
        if message["role"] == "assistant":
            calling = traits.calls and bool(message.get("tool_calls"))
        if message["role"] == "tool" and not calling:
            yield {"role": "user", "content": message.get("content")}
        else:
            yield message


def _calls_answered(messages: Iterable[Message]) -> Iterator[Message]:
    """Where a turn of the user follows calls without a result, it takes the result's place."""
    calls: Sequence[Any] = ()
    for message in messages:
        if calls and message["role"] == "user":
            content = message.get("content")
            yield {"role": "tool", "tool_call_id": _id_of(calls[-1]) or "", "content": content}
        else:
            yield message
        calls = message.get("tool_calls") or ()


def _ids_with_names(messages: Iterable[Message]) -> Iterator[Message]:
    """Calls whose ids have the names of their tools, and results with these ids."""
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = str(_function_of(call).get("name"))
            id = _id_of(call)
            if id is None or not id.startswith(id_with_name(name, 0)[:-1]):
                ids[id or ""] = id_with_name(name, number)
                call = {**call, "id": ids[id or ""]}
            calls.append(call)
            number += 1
        if calls:
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            id = message.get("tool_call_id") or ""
            message = message | {"tool_call_id": ids.get(id, id)}
        yield message


def _one_call_each(messages: list[Message]) -> Iterator[Message]:
    """Each call in a message of its own, with its result behind it; calls without one come last."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        end = place
        while end < len(messages) and messages[end]["role"] != "assistant":
            end += 1
        yield from _in_turn(message, messages[place:end])
        place = end


def _in_turn(message: Message, behind: list[Message]) -> Iterator[Message]:
    """The calls of a message, and what stands behind it up to the next answer."""
    calls = list(message["tool_calls"])
    results: list[list[Message]] = [[] for _ in calls]
    places = {id: number for number, call in enumerate(calls) if (id := _id_of(call)) is not None}
    unknown: list[Message] = []
    rest: list[Message] = []
    for later in behind:
        if later["role"] != "tool":
            rest.append(later)
        elif later.get("tool_call_id") in places:
            results[places[later["tool_call_id"]]].append(later)
        else:
            unknown.append(later)
    for answers, call in zip(results, calls, strict=True):
        if unknown and not answers and None in (_id_of(call), unknown[0].get("tool_call_id")):
            answers.append(unknown.pop(0))
    pairs = list(zip(calls, results, strict=True))
    pairs = [pair for pair in pairs if pair[1]] + [pair for pair in pairs if not pair[1]]
    first = message
    for call, answers in pairs:
        yield first | {"tool_calls": [call]}
        yield from answers
        first = {"role": "assistant", "content": ""}
    yield from unknown
    yield from rest


def _id_of(call: Any) -> str | None:
    if isinstance(call, Mapping) and isinstance(call.get("id"), str):
        return str(call["id"])
    return None


def _with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits."""
    if message["role"] == "tool" and "tool_call_id" in message:
        return message | {"tool_call_id": short_id(message["tool_call_id"])}
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_call_with_short_id(call) for call in message["tool_calls"]]}


def _call_with_short_id(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    return {**call, "id": short_id(call.get("id"))}


def short_id(id: Any) -> str:
    """Nine letters and digits for an id, itself if it has them; the same for the same id."""
    if isinstance(id, str) and _NINE(id):
        return id
    number = int.from_bytes(hashlib.sha256(str(id).encode("utf-8", "replace")).digest())
    return "".join(_LETTERS[number // 62**digit % 62] for digit in range(9))


def _named_results(messages: Iterable[Message]) -> Iterator[Message]:
    """Results of calls with the names of their tools, of unknown calls with that of the last."""
    names: dict[str, Any] = {}
    last: Any = None
    for message in messages:
        for call in message.get("tool_calls") or ():
            last = _function_of(call).get("name")
            names[_id_of(call) or ""] = last
        name = names.get(str(message.get("tool_call_id")), last)
        if message["role"] == "tool" and name is not None:
            message = {"name": name, **message}
        yield message


def _contents_shown(messages: Iterable[Message], traits: TemplateTraits) -> Iterator[Message]:
    """Messages of calls, with the contents beside which the template shows these."""
    for message in messages:
        content = message.get("content")
        if not message.get("tool_calls"):
            yield message
        elif not content or (isinstance(content, str) and not content.strip()):
            # White space would hide calls that no text may stand beside
            if content and traits.beside_calls != "together":
                message = message | {"content": ""}
            yield _calls_alone(message, traits)
        elif traits.beside_calls == "together":
            yield message
        elif traits.beside_calls == "dropped":
            yield _calls_alone(message | {"content": None}, traits)
        else:
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            # It kept the text from being a thought beside calls
            if said.get("thinking") == "":
                del said["thinking"]
            yield said
            calls = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
            yield _calls_alone(calls, traits)


def _calls_alone(message: Message, traits: TemplateTraits) -> Message:
    """A message of calls without text."""
    usual = "absent"
    if "content" in message:
        usual = "empty"
    is_shown = message.get("content", "") is not None and usual in traits.contents
    if is_shown or not traits.contents:
        return message
    rest = {name: value for name, value in message.items() if name != "content"}
    return rest | CONTENTS[traits.contents[0]]


# Turns


def _empty_answers_dropped(messages: list[Message], continues: bool) -> Iterator[Message]:
    """The messages without answers that have neither text nor calls."""
    for place, message in enumerate(messages, 1):
        said = message.get("content") or message.get("tool_calls")
        kept = continues and place == len(messages)
        if said or kept or message["role"] != "assistant":
            yield message


def _opened(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, with an empty turn of the user in front where the user does not begin."""
    begun = False
    for message in messages:
        if not begun and message["role"] != "system":
            begun = True
            if message["role"] != "user":
                yield {"role": "user", "content": ""}
        yield message
    if not begun:
        yield {"role": "user", "content": ""}


def _neighbours_joined(messages: Iterable[Message], traits: TemplateTraits) -> list[Message]:
    """Neighbours as one message where the template does not show both."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and _joins(turns[-1], message, traits):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_as_one(turn) for turn in turns]


def _as_one(turn: list[Message]) -> Message:
    """One message with the texts of all of a turn; what else they have is that of the first."""
    if len(turn) == 1:
        return turn[0]
    whole: Message = {}
    for message in reversed(turn):
        whole |= message
    for name in ("content", "reasoning_content"):
        texts = [message[name] for message in turn if name in message]
        if len(texts) > 1:
            whole[name] = joined(texts)
    return whole


def _joins(turn: list[Message], message: Message, traits: TemplateTraits) -> bool:
    """Whether a message belongs to the turn before it."""
    role = turn[0]["role"]
    if message["role"] == "user" and role == "tool":
        return not traits.user_after_result
    if traits.any_turns or role != message["role"]:
        return False
    if role == "user":
        return True
    if role != "assistant" or (turn[-1].get("tool_calls") and traits.calls):
        return False
    return traits.beside_calls != "apart" or not message.get("tool_calls")


# Tools


def _filled(tool: Any) -> Any:
    """A tool with a description and a whole schema, which may be empty."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    function = tool["function"]
    schema = EMPTY_SCHEMA | dict(function.get("parameters") or {})
    whole = {**function, "parameters": schema}
    whole.setdefault("description", "")
    return {**tool, "function": whole}
