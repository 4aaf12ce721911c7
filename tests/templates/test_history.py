"""Histories in the form that templates show: every mark is shown, in order, and a conversation that
grows keeps its beginning."""

from __future__ import annotations

import functools
import json
import random
import time
from typing import Any

import pytest

from jaxllm.chat_template import TemplateInput
from jaxllm.server.rendering.worker import Renderer, answer
from jaxllm.templates.history import shaped_messages, short_id
from jaxllm.templates.traits import TemplateTraits
from tests.templates.families import EXPECTED, TEMPLATES
from tests.templates.test_traits import renderer_of

type Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {"v": {"type": "string"}}, "required": []},
    },
}
# Their turns alternate, and they show no text beside calls
HIDES_TEXT = {"mistral_v3"}


@functools.cache
def rendering(family: str) -> tuple[Renderer, TemplateTraits]:
    renderer = renderer_of(TEMPLATES[family])
    return renderer, renderer.probe("", {})


def text_of(family: str, messages: list[Message], **options: Any) -> str:
    """The rendered conversation, as the process makes it of a job."""
    renderer, traits = rendering(family)
    arguments = TemplateInput(messages=messages, tools=[TOOL], **options).arguments(
        renderer.chat_template
    )
    job = {
        "arguments": arguments,
        "sanitize": True,
        "max_chars": 1 << 20,
        "traits": traits.as_json(),
    }
    reply = answer(json.loads(json.dumps(job)), renderer)
    assert "text" in reply, reply
    return str(reply["text"])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*values: str, text: str = "", ids: str = "call_") -> Message:
    made = [
        {
            "id": f"{ids}{value}",
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps({"v": value})},
        }
        for value in values
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def result(value: str, text: str | None = None, ids: str = "call_") -> Message:
    content = f"result-{value}" if text is None else text
    return {"role": "tool", "tool_call_id": f"{ids}{value}", "content": content}


def in_order(text: str, *marks: str) -> bool:
    """Whether a text has marks in this order, each once."""
    places = [text.find(mark) for mark in marks]
    assert all(text.count(mark) == 1 for mark in marks), (marks, text)
    return places == sorted(places)


def shows(family: str, member: str) -> bool:
    return bool(getattr(TemplateTraits(**EXPECTED[family]), member))


CALLING = [family for family in TEMPLATES if shows(family, "calls")]


@pytest.mark.parametrize("family", CALLING)
@pytest.mark.parametrize("text", ["", "\n\n", "before-it"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_and_its_result_are_shown(family: str, text: str, goes_on: bool) -> None:
    messages = [user("ask"), calls("one", text=text), result("one", "found")]
    marks = ["ask", "one", "found"]
    if text.strip() and family not in HIDES_TEXT:
        marks.insert(1, text)
    if goes_on:
        messages += [said("answer"), user("further")]
        marks += ["answer", "further"]
    shown = text_of(family, messages)
    for hidden in ("call_one", short_id("call_one")):
        shown = shown.replace(hidden, "")
    assert in_order(shown, *marks)


@pytest.mark.parametrize("family", CALLING)
def test_several_calls_stand_with_their_results(family: str) -> None:
    first = calls("aaa", "bbb", "ccc", text="before-it")
    messages = [user("ask"), first, result("ccc", "rrr"), result("aaa", "ppp"), user("further")]
    shown = text_of(family, messages)
    for name in ("call_aaa", "call_bbb", "call_ccc"):
        shown = shown.replace(name, "").replace(short_id(name), "")
    if shows(family, "several_calls"):
        assert in_order(shown, "ask", "aaa", "bbb", "ccc", "rrr", "ppp")
    else:
        # Each with its result; the one without comes last
        assert in_order(shown, "ask", "before-it", "aaa", "ppp", "ccc", "rrr", "bbb", "further")


@pytest.mark.parametrize("family", CALLING)
@pytest.mark.parametrize(
    "arguments", ['{"n": 777, "t": "cut', "null", "[777]", "", "{}", "no JSON", '"x"', None]
)
def test_a_call_that_is_no_object_ends_no_session(family: str, arguments: Any) -> None:
    message = calls("one")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    shown = text_of(family, [user("ask"), message, result("one"), said("answer"), user("further")])
    assert in_order(shown, "ask", "result-one", "answer", "further")
    if arguments is not None and arguments.startswith("{") and "777" in arguments:
        assert "777" in shown and "cut" in shown


@pytest.mark.parametrize("family", CALLING)
def test_arguments_keep_their_digits(family: str) -> None:
    digits = "123456789012345678901234567890"
    message = calls("one")
    message["tool_calls"][0]["function"]["arguments"] = f'{{"a": 1, "a": {digits}}}'
    assert digits in text_of(family, [user("ask"), message, result("one")])


@pytest.mark.parametrize("family", CALLING)
def test_values_of_all_types_are_shown(family: str) -> None:
    message = calls("one")
    values = '{"n": 731, "l": [732, {"deep": 733}], "z": null, "b": true, "t": "734"}'
    message["tool_calls"][0]["function"]["arguments"] = values
    shown = text_of(family, [user("ask"), message, result("one")])
    assert all(number in shown for number in ("731", "732", "733", "734"))


LATE = {
    "before a turn of the user": [user("ask"), said("answer"), system("late"), user("further")],
    "behind it": [user("ask"), said("answer"), user("further"), system("late")],
    "at the end": [user("ask"), said("answer"), system("late")],
    "between answers": [user("ask"), said("answer"), system("late"), said("more"), user("further")],
    "twice": [user("ask"), said("answer"), system("late"), system("later"), user("further")],
}
CALLED = {
    "behind a result": [user("ask"), calls("one"), result("one"), system("late")],
    "before a result": [user("ask"), calls("one"), system("late"), result("one")],
    "between results": [
        *(user("ask"), calls("one", "two"), result("one"), system("late"), result("two")),
    ],
    "before an answer": [user("ask"), calls("one"), result("one"), system("late"), said("answer")],
    "between calls": [
        *(user("ask"), calls("one"), result("one"), system("late"), calls("two"), result("two")),
    ],
}
GATHERED = {"deepseek_v3"}  # shows all system messages in front, as it always did
MARKS = ("ask", "answer", "late", "later", "more", "further", "result-one", "result-two")


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("head", [[], [system("first")], [system("first"), system("second")]])
@pytest.mark.parametrize("place", LATE | CALLED)
def test_late_system_messages_are_shown_where_they_stand(
    family: str, head: list[Message], place: str
) -> None:
    if place in CALLED and family not in CALLING:
        return
    messages = [*head, *(LATE | CALLED)[place]]
    shown = text_of(family, messages)
    given = [message["content"] for message in messages if message["content"]]
    assert all(text in shown for text in given)
    if family in GATHERED:
        return
    if place == "before a result" or place == "between results":
        if not shows(family, "late_system"):
            assert shown.rindex("late") > max(shown.rindex(text) for text in given if "res" in text)
        return
    places = [shown.index(text) for text in given]
    assert places == sorted(places)


@pytest.mark.parametrize("family", [*TEMPLATES])
def test_late_texts_are_never_put_into_an_earlier_turn(family: str) -> None:
    traits = TemplateTraits(**EXPECTED[family])
    if traits.late_system or not traits.any_turns:
        return
    for messages in (*LATE.values(), *CALLED.values()):
        shaped = shaped_messages(messages, traits)
        assert all(message["role"] != "system" for message in shaped)
        holder = next(message for message in shaped if "late" in message["content"])
        assert holder["role"] == "user" and "ask" not in holder["content"]
        assert holder["content"].startswith("late")


def random_conversation(rng: random.Random, family: str) -> tuple[list[Message], list[int]]:
    """A conversation as agents make it, and its lengths at which answers were made."""
    messages: list[Message] = [system("s0")] if rng.random() < 0.5 else []
    if messages and rng.random() < 0.3:
        messages.append(system("s1"))
    ends = []
    for turn in range(rng.randrange(1, 4)):
        messages.append(user(f"u{turn}"))
        for _ in range(rng.randrange(0, 2)):
            messages.insert(len(messages) - rng.randrange(2), system(f"late{len(messages)}"))
        for step in range(rng.randrange(0, 3) if family in CALLING else 0):
            ends.append(len(messages))
            names = [f"{turn}x{step}x{number}" for number in range(rng.randrange(1, 4))]
            messages.append(calls(*names, text=rng.choice(["", f"t{turn}.{step}"])))
            results = [result(name) for name in names]
            rng.shuffle(results)
            messages += results
            if rng.random() < 0.3:
                messages.append(system(f"late{len(messages)}"))
        ends.append(len(messages))
        messages.append(said(f"a{turn}"))
    return messages, ends


@pytest.mark.parametrize("family", TEMPLATES)
def test_conversations_of_agents_are_shown_whole_and_keep_their_beginnings(family: str) -> None:
    rng = random.Random(family)
    traits = TemplateTraits(**EXPECTED[family])
    for _ in range(60):
        messages, ends = random_conversation(rng, family)
        shown = text_of(family, messages, add_generation_prompt=False)
        for message in messages:
            hidden = message.get("tool_calls") and family in HIDES_TEXT
            assert hidden or message["content"] in shown
            for call in message.get("tool_calls", ()):
                assert json.loads(call["function"]["arguments"])["v"] in shown
        whole = shaped_messages(messages, traits)
        for end in ends:
            beginning = shaped_messages(messages[:end], traits)
            assert whole[: len(beginning)] == beginning


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_last_message_may_be_continued(family: str) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [system("first"), user("ask"), system("late"), said("the answer is")]
    assert text_of(family, messages, **options).endswith("the answer is")


@pytest.mark.parametrize("family", TEMPLATES)
def test_plain_histories_stay_as_they_are(family: str) -> None:
    messages = [user("ask"), said("answer"), user("further")]
    if shows(family, "system"):
        messages.insert(0, system("first"))
    assert shaped_messages(messages, TemplateTraits(**EXPECTED[family])) == messages


def test_ids_are_made_nine_letters_and_digits_alike_for_calls_and_results() -> None:
    traits = TemplateTraits(any_ids=False)
    fits = {"role": "tool", "tool_call_id": "abcDEF123", "content": "x"}
    call, reply, same = shaped_messages([calls("one"), result("one"), fits], traits)
    made = call["tool_calls"][0]["id"]
    assert made == reply["tool_call_id"] == short_id("call_one")
    assert len(made) == 9 and made.isalnum() and same == fits
    assert short_id("call_two") != made


def test_results_without_ids_go_to_the_calls_in_order() -> None:
    message = calls("one", "two")
    for call in message["tool_calls"]:
        del call["id"]
    results = [{"role": "tool", "content": "p"}, {"role": "tool", "content": "q"}]
    shaped = shaped_messages([message, *results], TemplateTraits(several_calls=False))
    assert [one.get("content") for one in shaped] == ["", "p", "", "q"]


def test_contents_of_parts_are_joined_as_parts() -> None:
    traits = TemplateTraits(late_system=False, any_turns=False)
    parts = [{"type": "text", "text": "further"}]
    messages = [user("ask"), said("answer"), system("late"), {"role": "user", "content": parts}]
    texts = [part["text"] for part in shaped_messages(messages, traits)[-1]["content"]]
    assert texts == ["late", "\n\n", "further"]


def test_tools_without_members_get_them_where_the_template_needs_them() -> None:
    renderer, traits = rendering("qwen3_coder")
    bare = {"type": "function", "function": {"name": "bare", "parameters": {}}}
    arguments = TemplateInput(messages=[user("ask")], tools=[bare]).arguments("")
    assert "bare" in renderer.render(arguments, True, traits)


def test_thousands_of_neighbours_become_one_turn_at_once() -> None:
    messages = [{"role": "user", "content": "x" * 200}] * 10_000
    begin = time.process_time()
    (turn,) = shaped_messages(messages, TemplateTraits(any_turns=False))
    assert time.process_time() - begin < 1
    assert turn["content"] == "\n\n".join(["x" * 200] * 10_000)
