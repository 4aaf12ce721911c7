"""Conversations with tools: when to call, what, how often, and what to say afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from examples.demo_model import generate, talk
from examples.demo_model.generate import Message, Sample
from examples.demo_model.skills import schemas, values
from examples.demo_model.skills.jobs import (
    Job,
    Tool,
    draw_required,
    invented_kind,
    make_job,
    make_tool,
    others,
)
from examples.demo_model.skills.kinds import Kind, always
from examples.demo_model.skills.tools import BY_NAME, DOES, FINDS, KINDS, SUMS

NO_TOOL = "I have no tool for that."
ANSWERED = "The tool has answered."
THOUGHT = "reasoning_content"
# Kinds whose questions the model also answers by itself, or that fit every question
VAGUE = {"sum_numbers", "search", *(kind.names[0] for kind in SUMS)}
PLAIN_KINDS = tuple(kind for kind in KINDS if kind.names[0] not in VAGUE)
INCOMPLETE = {
    "get_weather": ("What is the weather?", "How is the weather?", "Get the weather."),
    "get_time": ("What time is it?", "Tell me the time.", "What's the time there?"),
    "get_population": ("How many people live there?", "What is the population?"),
    "get_stock_price": ("What is the stock price?", "How much is a share?"),
    "get_order": ("Where is my order?", "Track my order."),
    "find_email": ("Find an email address.", "Find a mail address for me."),
    "read_file": ("Read a file.", "Open a file for me."),
    "send_email": ("Send an email.", "Write a mail for me."),
    "set_timer": ("Set a timer.", "Start a timer."),
    "create_event": ("Put something into my calendar.", "Make an appointment."),
    "order_item": ("I want to order something.", "Buy something for me."),
    "play_music": ("Play something.", "Play music."),
    "book_table": ("Book a table.", "Reserve a table for me."),
    "run_command": ("Run a command.", "Execute something."),
}
BEGIN = {"add": "Add {} and {}", "multiply": "Multiply {} and {}", "subtract": "Take {1} from {0}"}
THEN = {"add": "add {}", "multiply": "multiply by {}", "subtract": "subtract {}"}
FAILURES = ("not found", "timeout", "permission denied", "no connection", "server busy")


@dataclass(frozen=True)
class Draft:
    """A conversation before it is written down.

    Attributes:
        messages: thoughts included, whether or not they are wanted.
        fixed: no other tools may be offered.
    """

    messages: list[Message]
    tools: Sequence[Tool]
    fixed: bool = False


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def say(content: str, thought: str) -> Message:
    """An answer."""
    return {"role": "assistant", "content": content, THOUGHT: thought}


def call(jobs: Sequence[Job], thought: str) -> Message:
    """An answer that calls tools."""
    calls = [
        {"type": "function", "function": {"name": job.tool.name, "arguments": job.arguments}}
        for job in jobs
    ]
    return say("", thought) | {"tool_calls": calls}


def results(jobs: Sequence[Job]) -> list[Message]:
    """What the tools answer."""
    return [{"role": "tool", "content": job.result} for job in jobs]


def run(jobs: Sequence[Job], thought: str = "") -> list[Message]:
    """Calls, their results and the reply."""
    names = list(dict.fromkeys(job.tool.name for job in jobs))
    thought = thought or f"I call {' and '.join(names)}" + (
        " once for each." if len(jobs) > len(names) else "."
    )
    reply = " ".join(dict.fromkeys(job.reply for job in jobs))
    return [call(jobs, thought), *results(jobs), say(reply, ANSWERED)]


def pick(rng: random.Random, held: bool, kinds: tuple[Kind, ...] = KINDS) -> Kind:
    """A kind of the table, or an invented one."""
    if kinds is KINDS and rng.random() < 0.3:
        return invented_kind(rng, held)
    return rng.choice(kinds)


def one_call(rng: random.Random, held: bool) -> Draft:
    """One call."""
    tool = make_tool(rng, pick(rng, held))
    job = make_job(rng, tool, held)
    return Draft([user(job.question), *run([job])], [tool])


def same_tool(rng: random.Random, held: bool) -> Draft:
    """Two to four calls of one tool at once."""
    kind = rng.choice([one for one in KINDS if one.several])
    tool = make_tool(rng, replace(kind, parameters=kind.parameters[:1]))
    jobs: dict[str, Job] = {}
    for _ in range(rng.choice((2, 2, 2, 3, 3, 4))):
        job = make_job(rng, tool, held)
        jobs[job.subject] = job
    names = list(jobs)
    joined = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
    question = rng.choice(kind.asks).format(joined)
    return Draft([user(question), *run(list(jobs.values()))], [tool])


def different_tools(rng: random.Random, held: bool) -> Draft:
    """Two or three calls of different tools at once."""
    tools = [make_tool(rng, pick(rng, held))]
    tools += others(rng, tools, rng.choice((1, 1, 2)))
    jobs = [make_job(rng, tool, held) for tool in tools]
    question = rng.choice((" ", " And: ", " Also: ", "\n")).join(
        job.question + ("" if job.question[-1] in ".?!" else ".") for job in jobs
    )
    return Draft([user(question), *run(jobs)], tools)


def data_as_call(rng: random.Random, held: bool) -> Draft:
    """What a text says, as the arguments of a tool: so libraries ask for structured answers."""
    made = rng.choice((schemas.record, schemas.record, schemas.several, schemas.nested))(rng, held)
    name = rng.choice(("final_result", made.title.capitalize(), f"save_{made.title}", "extract"))
    kind = Kind((name,), (), (), (), always("saved"), "status", "Done.", split=lambda _: held)
    about = rng.choice(("", "The final response.", f"Save a {made.title}.", "Extracted data"))
    function = {"name": name, "description": about, "parameters": made.schema}
    tool = Tool(kind, name, (), {"type": "function", "function": function})
    ask = rng.choice(("{}", "Extract the data: {}", "{} Save it.", "Extract: {}"))
    result = rng.choice(("saved", "Final result processed.", "ok"))
    job = Job(tool, made.value, ask.format(made.text), "", result, "Done.")
    return Draft([user(job.question), *run([job])], [tool])


def follow(first: Job, second: Job, question: str) -> Draft:
    """Two calls, of which the second needs the first one's result."""
    names = first.tool.name, second.tool.name
    return Draft(
        [
            user(question),
            call([first], f"I call {names[0]}, then {names[1]}."),
            *results([first]),
            *run([second], f"{ANSWERED} Now I call {names[1]}."),
        ],
        [first.tool, second.tool],
    )


def sums_in_turn(rng: random.Random, held: bool) -> Draft:
    """A sum, difference or product, and another with its result."""
    tools = [make_tool(rng, kind) for kind in rng.sample(SUMS, 2)]
    while True:
        first = make_job(rng, tools[0], held)
        a, b = first.arguments.values()
        value = int(first.reply)
        number = rng.randint(2, 99)
        if value >= 0 and tools[1].kind.held_out([value, number]) == held:
            break
    second = make_job(rng, tools[1], held, [value, number])
    first_name, second_name = (tool.kind.names[0] for tool in tools)
    begin, then = BEGIN[first_name].format(a, b), THEN[second_name].format(number)
    question = f"{begin}, then {then}" + rng.choice((".", " to get the answer.", ""))
    return follow(first, second, question)


def two_steps(rng: random.Random, held: bool) -> Draft:
    """A result of one tool is an argument of the next."""
    form = rng.randrange(4)
    if form == 3:
        return sums_in_turn(rng, held)
    source, target, question = (
        ("find_email", "send_email", "Send an email to {0} with the subject {1} and the text {2}."),
        ("read_file", "run_command", "Run the command that stands in {0}."),
        ("read_file", "play_music", "Play the song that {0} names."),
    )[form]
    tools = [make_tool(rng, BY_NAME[name]) for name in (source, target)]
    first, required = make_job(rng, tools[0], held), draw_required(rng, tools[1].kind, held)
    first = replace(first, result=str(required[0]))
    second = make_job(rng, replace(tools[1], keys=without_options(tools[1])), held, required)
    return follow(first, second, question.format(first.subject, *required[1:]))


def without_options(tool: Tool) -> tuple[str | None, ...]:
    """The keys of a tool whose optional arguments are not given."""
    return tuple(
        None if one.said else key for one, key in zip(tool.kind.parameters, tool.keys, strict=True)
    )


def no_tool_needed(rng: random.Random, held: bool) -> Draft:
    """A question that the model answers itself, whatever the tools."""
    tools = others(rng, (), rng.randint(1, 4), PLAIN_KINDS)
    return Draft(plain_turn(rng, held), tools, fixed=True)


def plain_turn(rng: random.Random, held: bool) -> list[Message]:
    """A question without tools and its answer, which does not depend on thinking."""
    if rng.random() < 0.4:
        return generate.turn(talk.exchange(rng), True)
    while True:
        problem = generate.draw(rng, held)
        if not problem.task.startswith("long"):
            return generate.turn(problem, True)


def no_tool_fits(rng: random.Random, held: bool) -> Draft:
    """What is asked needs a tool that is not there."""
    missing = make_tool(rng, rng.choice(PLAIN_KINDS))
    job = make_job(rng, missing, held)
    tools = others(rng, [missing], rng.randint(1, 4), PLAIN_KINDS)
    if not tools:
        return no_tool_fits(rng, held)
    return Draft([user(job.question), say(NO_TOOL, "No tool fits.")], tools, fixed=True)


def incomplete(rng: random.Random, held: bool) -> Draft:
    """A question without the arguments, which the model asks for."""
    name = rng.choice(sorted(INCOMPLETE))
    tool = make_tool(rng, BY_NAME[name])
    tool = replace(tool, keys=without_options(tool))
    job = make_job(rng, tool, held)
    wanted = [str(key).replace("_", " ") for key in job.arguments]
    listed = ", ".join(wanted[:-1]) + (" and " if len(wanted) > 1 else "") + wanted[-1]
    needed = [one for one in tool.kind.parameters if not one.said]
    told = [one.shown(value) for one, value in zip(needed, job.arguments.values(), strict=True)]
    return Draft(
        [
            user(rng.choice(INCOMPLETE[name])),
            say(f"Please tell me the {listed}.", f"The {listed} is missing."),
            user(", ".join(told) + rng.choice(("", "."))),
            *run([job]),
        ],
        [tool],
    )


def failed(rng: random.Random, held: bool) -> Draft:
    """A tool that answers with an error."""
    tool = make_tool(rng, pick(rng, held))
    reason = rng.choice((*FAILURES, f"code {rng.randint(100, 599)}", values.title(rng)))
    result = rng.choice((f"Error: {reason}", f"error: {reason}", json.dumps({"error": reason})))
    job = replace(make_job(rng, tool, held), result=result)
    job = replace(job, reply=f"The tool failed: {reason}.")
    return Draft([user(job.question), *run([job])], [tool])


def several_turns(rng: random.Random, held: bool) -> Draft:
    """Two to four questions, one after the other, with and without a call."""
    tools = [make_tool(rng, rng.choice(FINDS[:9])), make_tool(rng, rng.choice(DOES))]
    last = make_job(rng, tools[0], held)
    messages = [user(last.question), *run([last])]
    for _ in range(rng.randint(1, 3)):
        chance = rng.random()
        if chance < 0.45 and last.tool.kind.several:
            last = make_job(rng, replace(last.tool, keys=without_options(last.tool)), held)
            again = rng.choice(("And {}?", "What about {}?", "And for {}?", "Now {}."))
            messages += [user(again.format(last.subject)), *run([last])]
        elif chance < 0.75:
            last = make_job(rng, rng.choice(tools), held)
            messages += [user(last.question), *run([last])]
        else:
            messages += plain_turn(rng, held)
    return Draft(messages, tools)


Errand = Callable[[random.Random, bool], Draft]
# By their names in the evaluation, with their shares
ERRANDS: dict[str, tuple[Errand, int]] = {
    "one call": (one_call, 34),
    "parallel calls of one tool": (same_tool, 12),
    "parallel calls of different tools": (different_tools, 10),
    "calls in turn": (two_steps, 10),
    "data of a text": (data_as_call, 8),
    "no tool needed": (no_tool_needed, 9),
    "no tool fits": (no_tool_fits, 6),
    "missing arguments": (incomplete, 6),
    "failed call": (failed, 5),
    "several turns": (several_turns, 8),
}


def offer(rng: random.Random, draft: Draft, most: int) -> list[dict[str, Any]]:
    """The draft's tools with up to `most` others that do not fit, in any order."""
    used = {tool.kind.names[0] for tool in draft.tools}
    unused = tuple(kind for kind in PLAIN_KINDS if kind.names[0] not in used)
    count = min(rng.randint(0, most), rng.randint(0, most))  # rather fewer: tools are long
    tools = [*draft.tools, *others(rng, draft.tools, count, unused)]
    rng.shuffle(tools)
    return [tool.definition for tool in tools]


def finish(rng: random.Random, draft: Draft, thinking: bool, tool_format: str) -> Sample:
    """The conversation as it is written down."""
    messages = [
        message if thinking else {key: message[key] for key in message if key != THOUGHT}
        for message in draft.messages
    ]
    # What has no tool to call must stay so
    most = 0 if draft.fixed else 3 if rng.random() < 0.97 else 16
    variables = {"tool_format": tool_format, "enable_thinking": thinking}
    return Sample(generate.system(rng) + messages, offer(rng, draft, most), variables=variables)


def cut(rng: random.Random, draft: Draft) -> Draft:
    """The draft up to the answer to one of its questions: templates drop the thoughts of earlier
    ones."""
    asked = [i for i, message in enumerate(draft.messages) if message["role"] == "user"]
    return replace(draft, messages=draft.messages[: rng.choice([*asked[1:], None])])


def written_down(rng: random.Random, errand: Errand) -> Sample:
    """One conversation of a kind, in either format, with thoughts or without."""
    draft = cut(rng, errand(rng, False))
    return finish(rng, draft, rng.random() < 0.35, "xml" if rng.random() < 0.45 else "json")


def sample(rng: random.Random) -> Sample:
    """One conversation of the training text."""
    (name,) = rng.choices(list(ERRANDS), [share for _, share in ERRANDS.values()])
    return written_down(rng, ERRANDS[name][0])
