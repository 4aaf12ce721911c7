"""Renders conversations in processes that can be killed: a hostile template or conversation costs
its sender alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import orjson

from jaxllm.background.process import JobLate, JobLost, JobProcess, python_command
from jaxllm.chat_template import Template
from jaxllm.server.errors import ApiError, bad_request, overloaded, sanitize, shutting_down
from jaxllm.server.rendering.limits import (
    ALL_PROBES_SECONDS,
    BUDGETS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    MEMORY_BYTES,
    PROBE_SECONDS,
)
from jaxllm.templates.traits import (
    AS_GIVEN,
    TemplateTraits,
    TraitsByName,
    name_for,
    named_templates,
)

COMMAND = python_command("jaxllm.server.rendering.worker")


class RenderProcess(JobProcess):
    """The process of one lane, whose jobs take at most `seconds` of processor time."""

    name = "template renderer"
    wall_seconds = 30.0
    max_reply = 1 << 30  # the job has a limit of its own

    def __init__(
        self, facts: dict[str, Any], seconds: float, command: Sequence[str] = COMMAND
    ) -> None:
        super().__init__({"facts": facts, "seconds": seconds}, command)
        self._templates: Template = facts["template"]

    def traits(self, variables: dict[str, Any]) -> TraitsByName:
        """What each template shows where these variables have values, found out within bounds of
        time. Raises JobLost."""
        traits: TraitsByName = {}
        deadline = time.monotonic() + ALL_PROBES_SECONDS
        for name in named_templates(self._templates):
            if time.monotonic() > deadline:
                traits[name] = TemplateTraits(fault="the probes of other templates took too long")
                continue
            job = {"probe": name, "variables": variables, "seconds": PROBE_SECONDS}
            reply = self.reply_to(encoded(job))
            if "traits" in reply:
                traits[name] = TemplateTraits.from_json(reply["traits"])
            else:
                spent = "memory" if "memory" in reply else "processor time"
                traits[name] = TemplateTraits(fault=f"its probes took too much {spent}")
        return traits

    def reply_to(self, line: bytes) -> dict[str, Any]:
        """The reply to an encoded job, see `worker`. Raises JobLost, always after
        `end_process`."""
        try:
            with self._lock:
                return self._run(line, closings=0)
        except JobLate:
            return {"spent": True}


def found_traits(facts: dict[str, Any], variables: dict[str, Any]) -> TraitsByName:
    """What each chat template shows, found out in a process that ends then. Raises JobLost.

    Args:
        facts: `Tokenizer.template_facts`.
        variables: values that the operator gives to variables of the templates.
    """
    process = RenderProcess(facts, BUDGETS[-1])
    try:
        return process.traits(variables)
    finally:
        process.end_process()


class Renders:
    """Renders in lanes, each with more time than the last, a process and a thread of its own.

    Quick conversations wait for other quick ones, and for a slow one until it leaves their lane. A
    job whose client has gone is not begun.

    Before the first conversation it is found out what the templates show; histories are shaped for
    them.

    Args:
        facts: `Tokenizer.template_facts`.
        variables: values that the operator gives to variables of the templates.

    Attributes:
        processes: of each lane.
        waiting: conversations of each lane whose rendering has not ended.
        waiting_bytes: of their jobs.
    """

    def __init__(self, facts: dict[str, Any], variables: dict[str, Any] | None = None):
        self._templates: Template = facts["template"]
        self._variables = variables or {}
        self._probing: Future[TraitsByName] | None = None
        self.processes = [RenderProcess(facts, seconds) for seconds in BUDGETS]
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix=f"render-{lane}")
            for lane in range(len(BUDGETS))
        ]
        self.waiting = [0] * len(BUDGETS)
        self.waiting_bytes = [0] * len(BUDGETS)
        self._closed = False

    def start(self) -> None:
        """Start the first lane's process, and find out what the templates show: the first
        conversation would have to wait for both."""
        if self._probing is None:
            process = self.processes[0]
            self._probing = self._lanes[0].submit(process.traits, self._variables)

    @property
    def traits(self) -> TraitsByName:
        """What the templates show, as far as it has been found out."""
        probing = self._probing
        if probing is None or not probing.done() or probing.exception() is not None:
            return {}
        return probing.result()

    def traits_for(self, tools: Sequence[Any] | None) -> TemplateTraits:
        """What the template shows that renders conversations with these tools."""
        return self.traits.get(name_for(self._templates, tools), AS_GIVEN)

    async def _find_traits(self) -> None:
        """Return when it is found out what the templates show. Raises ApiError(503)."""
        probing = self._probing
        if probing is not None and probing.done():
            if probing.exception() is None:
                return
            self._probing = None  # the process was lost; try again
        self.start()
        assert self._probing is not None
        try:
            await asyncio.shield(asyncio.wrap_future(self._probing))
        except JobLost as error:
            raise _lost(error) from None

    async def text_of(
        self,
        arguments: dict[str, Any],
        sanitized: bool,
        max_chars: int,
        too_long: Callable[[int], ApiError],
    ) -> str:
        """A conversation as text.

        Args:
            arguments: `TemplateInput.arguments`.
            sanitized: whether control tokens in it are marked, for `Tokenizer.encode_chat`.
            max_chars: of the text.
            too_long: makes the refusal of a text of more characters than that.

        Raises:
            ApiError: the template refused it, it is too long or costs too much, or the queue is
                full.
        """
        if self._closed:
            raise shutting_down()
        await self._find_traits()
        traits = self.traits_for(arguments["tools"])
        job = encoded(
            {
                "arguments": arguments,
                "sanitize": sanitized,
                "max_chars": max_chars,
                "traits": traits.as_json(),
            }
        )
        for lane in range(len(BUDGETS)):
            reply = await self._reply(lane, job)
            if "text" in reply:
                return str(reply["text"])
            if "spent" not in reply:
                break
        if "chars" in reply:
            raise too_long(reply["chars"])
        raise refusal(reply)

    async def _reply(self, lane: int, job: bytes) -> dict[str, Any]:
        if self._closed:
            raise shutting_down()
        waiting = self.waiting[lane]
        size = self.waiting_bytes[lane] + len(job)
        if waiting >= MAX_WAITING[lane] or (waiting and size > MAX_WAITING_BYTES[lane]):
            raise overloaded(
                f"{waiting} conversations wait to be rendered, {self.waiting_bytes[lane]} bytes; "
                f"the limits are {MAX_WAITING[lane]} and {MAX_WAITING_BYTES[lane]}; retry later",
                "render_queue_full",
            )
        self.waiting[lane] += 1
        self.waiting_bytes[lane] = size
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._lanes[lane], self.processes[lane].reply_to, job
            )
        except JobLost as error:
            raise _lost(error) from None
        finally:
            self.waiting[lane] -= 1
            self.waiting_bytes[lane] -= len(job)

    async def shut_down(self) -> None:
        """End the processes at once; who waits for them gets a 503. May be called again."""
        self._closed = True
        await asyncio.gather(
            *(asyncio.to_thread(process.end_process) for process in self.processes)
        )
        for threads in self._lanes:
            threads.shutdown(wait=False)


def _lost(error: JobLost) -> ApiError:
    return overloaded(sanitize(str(error)), "template_renderer_lost")


def encoded(job: dict[str, Any]) -> bytes:
    """A job as the worker reads it. Raises ApiError(400) on one that nests too deeply."""
    try:
        return orjson.dumps(job) + b"\n"
    except orjson.JSONEncodeError as error:
        text = f"the conversation cannot be rendered: {error}; nest it less deeply"
        raise refusal({"error": text}) from None


def refusal(reply: dict[str, Any]) -> ApiError:
    """The 400 for a conversation that the template cannot render."""
    if "error" in reply:
        text = sanitize(reply["error"])
    elif "memory" in reply:
        text = (
            f"the chat template needs more than {MEMORY_BYTES >> 30} GiB of memory for the "
            "conversation; shorten it, or have the operator change the template"
        )
    else:
        text = (
            f"the chat template needs more than {BUDGETS[-1]:g} s of processor time for the "
            "conversation; shorten it, or have the operator change the template"
        )
    return bad_request(text, "messages", "chat_template_error")
