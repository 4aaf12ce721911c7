"""How the text of a chat's answer is read: as reasoning, text and tool calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxllm.server.parsing.formats import Formats
from jaxllm.server.parsing.parts import Part, Reasoning, Text
from jaxllm.server.parsing.pipeline import Pipeline, pipeline
from jaxllm.server.requests.chat import ChatRequest
from jaxllm.server.requests.conversation import Conversation


def new_pipeline(
    request: ChatRequest, formats: Formats, prompt: str
) -> Callable[[], Pipeline] | None:
    """A function that makes the parser of one choice; None where the answer is text alone. `prompt`
    is the end of the rendered prompt."""
    schemas = request.tools.schemas
    if formats.reasoning is None and (formats.tools is None or schemas is None):
        return None
    keeps_all = request.include_reasoning and (schemas is None or request.tools.parallel)
    return functools.partial(
        pipeline,
        formats.reasoning,
        formats.tools,
        prompt=prompt,
        schemas=schemas,
        calls_before=request.conversation.calls,
        keep=None if keeps_all else functools.partial(is_wanted, request),
        wrappers=formats.wrappers,
    )


def is_wanted(request: ChatRequest, part: Part) -> bool:
    """Whether a reply has this part: reasoning if it is included, one call unless they may be
    parallel."""
    if isinstance(part, Reasoning):
        return request.include_reasoning
    return isinstance(part, Text) or part.index == 0 or request.tools.parallel


def continued_marker(conversation: Conversation, formats: Formats) -> str | None:
    """The last marker of reasoning in the message that the answer continues, which stands for the
    end of the prompt; None where no message is continued. A message without a marker has ended its
    thought."""
    if formats.reasoning is None or not conversation.continue_final_message:
        return None
    text = conversation.messages[-1]["content"]
    markers = formats.reasoning
    places = {text.rfind(marker): marker for marker in (*markers.starts, *markers.ends)}
    if max(places) >= 0:
        return places[max(places)]
    return markers.ends[0]
