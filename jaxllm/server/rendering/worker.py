"""The renderer's process: JSON lines in, JSON lines out; it may be killed at any time.

The first line holds the facts of the tokenizer and the budget of a job; its reply says that the
process is ready. A fork answers the jobs, until one takes more than its processor time: then the
kernel kills the fork, and another takes its place. A job that has "seconds" has a budget of its
own. Replies are:

- {"traits": members} of a template that was to be probed;
- {"text": the rendered conversation}, in which control tokens of the conversation are marked;
- {"error": reason}, from the template;
- {"chars": number} of a text that is longer than the job allows;
- {"memory": true} where the job needs too much of it;
- {"spent": true} where the job exceeded its processor time, or crashed the fork.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
from typing import Any, BinaryIO

import orjson
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import mark_control_tokens

from jaxllm.chat_template import TemplateError, known_variables, template_errors
from jaxllm.server.rendering.limits import MAX_MARKED, MEMORY_BYTES
from jaxllm.templates.probes import traits_of
from jaxllm.templates.rendering import prober, render_chat
from jaxllm.templates.traits import AS_GIVEN, TemplateTraits, gets_tools, named_templates

# The one signal that ends a fork and that no limit of a job sends; it comes when the machine is out
# of memory
FROM_OUTSIDE = {signal.SIGKILL}
# What stands before a control token that a conversation holds
MARK = mark_control_tokens("x", re.compile("x"))[0]


class Renderer(PreTrainedTokenizerFast):
    """A tokenizer without a vocabulary: it renders and marks conversations as the served model's
    own does."""

    def __init__(self, facts: dict[str, Any]):
        # Before `super().__init__`, which reads the properties
        self.__dict__["_special"] = facts["special_tokens"]
        self.__dict__["_added"] = {
            number: tokenizers.AddedToken(text, special=special)
            for number, (text, special) in enumerate(facts["added_tokens"])
        }
        super().__init__(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="")),
            chat_template=facts["template"],
            chat_control_tokens=facts["control_tokens"],
        )
        self._control: dict[str, tuple[str, ...]] = {}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The served model's, by their names in templates."""
        return self._special

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Those of the served model, in their order."""
        return self._added

    def _get_control_tokens(self, chat_template: str) -> tuple[str, ...]:
        if chat_template not in self._control:
            self._control[chat_template] = super()._get_control_tokens(chat_template)
        return self._control[chat_template]

    def compile_templates(self) -> None:
        """Have the templates ready before the first job."""
        template = self.chat_template
        for text in named_templates(template).values():
            self._get_control_tokens(text)

    def probe(self, name: str, variables: dict[str, Any]) -> TemplateTraits:
        """What the template of a name shows, where these variables have values."""
        template = self.chat_template
        text = named_templates(template)[name]
        render = prober(self, text, known_variables(variables, text))
        return traits_of(render, tools=gets_tools(template, name))

    def render(self, arguments: dict[str, Any], sanitize: bool, traits: TemplateTraits) -> str:
        """A conversation as text. Raises TemplateError."""
        text = render_chat(self, arguments, traits=traits, sanitize=sanitize)
        with template_errors():
            text.encode()  # half of a surrogate pair is no text
        if sanitize and text.count(MARK) > MAX_MARKED:
            raise TemplateError(
                f"the conversation writes {text.count(MARK)} control tokens as text, "
                f"the limit is {MAX_MARKED}; write fewer"
            )
        return text


def answer(job: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    """The reply to one job."""
    try:
        if "probe" in job:
            return {"traits": renderer.probe(job["probe"], job["variables"]).as_json()}
        traits = TemplateTraits.from_json(job["traits"]) if "traits" in job else AS_GIVEN
        text = renderer.render(job["arguments"], job["sanitize"], traits)
    except TemplateError as error:
        # A failed allocation is no matter of the template's text
        memory = isinstance(error.__context__, MemoryError)
        return {"memory": True} if memory else {"error": str(error)}
    if len(text) <= job["max_chars"]:
        return {"text": text}
    return {"chars": len(text)}


def answer_jobs(lines: BinaryIO, out: BinaryIO, renderer: Renderer, seconds: float) -> None:
    """Answer jobs until the end of `lines`, or until one needed too much memory, which may not all
    come back."""
    for line in iter(lines.readline, b""):
        # Processor time; SIGPROF ends a process that does not handle it
        signal.setitimer(signal.ITIMER_PROF, seconds)
        job = orjson.loads(line)
        if "seconds" in job:
            signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        reply = answer(job, renderer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(reply, out)
        if "memory" in reply:
            os._exit(1)


def say(reply: dict[str, Any], out: BinaryIO) -> None:
    """Write one line."""
    out.write(orjson.dumps(reply) + b"\n")
    out.flush()


def main() -> None:
    """Run the renderer's process: keep a fork that answers jobs."""
    # Sent to every process of a service
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.buffer
    out = sys.stdout.buffer
    hello = orjson.loads(lines.readline())
    renderer = Renderer(hello["facts"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer.compile_templates()
    gc.collect()
    gc.freeze()  # pages that forks share
    say({}, out)
    while True:
        if (fork := os.fork()) == 0:
            answer_jobs(lines, out, renderer, hello["seconds"])
            os._exit(0)
        status = os.waitpid(fork, 0)[1]
        if status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in FROM_OUTSIDE):
            return
        if os.WIFSIGNALED(status):
            say({"spent": True}, out)
