"""The structure of a chat's whole answer: thought, then the calls or the text that the request
demands."""

from __future__ import annotations

from jaxllm.grammar.pieces import (
    Composition,
    Either,
    FreeText,
    Literal,
    Maybe,
    Nested,
    OneOf,
    Pieces,
    Repeated,
)
from jaxllm.grammar.structure import StructureError
from jaxllm.messages import ThinkingBudget
from jaxllm.server.errors import bad_request, sanitize
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.formats import Formats
from jaxllm.server.parsing.thinking import ReasoningParser
from jaxllm.server.requests.chat import ChatRequest
from jaxllm.server.requests.structure import Structure

OF_OBJECTS = {"type": "object"}  # a schema without a type takes texts and numbers, too
NEWLINES = OneOf(("\n\n", "\n", ""))  # behind a thought


def answer_structure(request: ChatRequest, formats: Formats, prompt: str) -> Structure | None:
    """What the answer must be; None leaves it free. `prompt` is the end of the rendered prompt.

    With tool_choice required or a named tool the answer is calls, so a structure of text in the
    same request has nothing to constrain. Raises ApiError(400).
    """
    tools = request.tools
    parser = None
    if tools.callable:
        parser = formats.tools
    structure = request.generation.structure
    if formats.reasoning is not None:
        thought = thought_pieces(formats.reasoning, prompt)
    else:
        thought = ()
    if parser is not None and tools.mode == "required":
        marker, behind = call_pieces(request, parser)
        structure = Structure("tools", Composition("calls", (*thought, Literal(marker), *behind)))
    elif structure is not None:
        structure = _structured_text(request, structure, formats, thought)
    elif parser is not None and any(tool.strict for tool in tools.callable):
        marker, behind = call_pieces(request, parser)
        if marker:  # else nothing tells where calls begin
            body = parser.free_pieces((Literal(marker), *behind))
            structure = Structure("tools", Composition("calls", (*thought, *body)))
    if structure is not None and request.generation.params.use_beam_search:
        raise bad_request(f"{structure.field} cannot constrain a beam search", structure.field)
    return structure


def _structured_text(
    request: ChatRequest, structure: Structure, formats: Formats, thought: Pieces
) -> Structure:
    """Text of the request's structure, or calls where they may be made. Raises ApiError(400)."""
    begin = ""
    if formats.reasoning is not None:
        begin = formats.reasoning.reply
    parser = None
    if request.tools.callable:
        parser = formats.tools
    if parser is None and not thought and not begin:
        return structure
    try:
        text: Pieces = (Literal(begin), Nested(structure.params.job()))
    except StructureError as error:
        raise bad_request(f"{structure.field}: {sanitize(str(error))}", structure.field) from None
    if parser is not None:
        marker, behind = call_pieces(request, parser)
        if not marker:
            raise bad_request(
                f"{structure.field} beside tools needs a format of tool calls with a marker, which "
                "this model lacks; send tool_choice none or required, or leave either out",
                structure.field,
            )
        text = (Either(((Literal(marker), *behind), text)),)
    return Structure(structure.field, Composition(structure.params.constraint, thought + text))


def thinking_budget(request: ChatRequest, formats: Formats, prompt: str) -> ThinkingBudget | None:
    """The limit of the answer's thought; None where there is none, or nothing is left to think."""
    markers = formats.reasoning
    if request.thinking_budget is None or markers is None or prompt.rstrip().endswith(markers.ends):
        return None
    if formats.tools and request.tools.callable:
        also_ends = formats.tools.ends_thought()
    else:
        also_ends = ()
    return ThinkingBudget(
        tokens=request.thinking_budget,
        begun=markers(prompt).thinking,
        starts=markers.starts,
        ends=(*markers.ends, *also_ends),
    )


def thought_pieces(reasoning: type[ReasoningParser], prompt: str) -> Pieces:
    """The thought that comes first: all of it, its rest where the prompt has begun it, none where
    the prompt has ended it."""
    if prompt.rstrip().endswith(reasoning.ends):
        return ()
    start = reasoning.starts[0]
    end = reasoning.ends[0]
    rest: Pieces = (FreeText(end), Literal(end + reasoning.between))
    if not reasoning.between:  # which is the beginning of the next message's head
        rest = (*rest, NEWLINES)
    if reasoning(prompt).thinking:
        return rest
    return (Maybe((Literal(start), *rest)),)


def call_pieces(request: ChatRequest, parser: type[ToolParser]) -> tuple[str, Pieces]:
    """The marker with which calls begin, and what follows it: one call or several.

    The marker is "" in formats where text may begin in the same way.
    """
    section = parser.section
    tools = request.tools
    number = request.conversation.calls
    calls = [
        parser.pieces(tool.name, tool.parameters | OF_OBJECTS, number) for tool in tools.callable
    ]
    begin = (Literal(section.begin),) if section.begin else calls[0]
    marker = next((word for word in parser.open if _begins(begin, word)), "")
    first: Pieces = (Either(tuple(calls)),)
    if section.begin:
        first = (Literal(section.begin[len(marker) :]), *first)
    else:
        first = (Either(tuple(_behind(marker, call) for call in calls)),)
    many = tools.parallel and tools.named is None and parser.several and not parser.numbered
    more = (Repeated((Literal(section.between), Either(tuple(calls)))),) if many else ()
    return marker, (*first, *more, Literal(section.end))


def _begins(pieces: Pieces, marker: str) -> bool:
    """Whether pieces begin with a marker. A bracket is none."""
    first = pieces[0]
    return len(marker) > 1 and isinstance(first, Literal) and first.text.startswith(marker)


def _behind(marker: str, pieces: Pieces) -> Pieces:
    """The pieces behind the marker with which they begin."""
    first, *rest = pieces
    assert isinstance(first, Literal)
    return (Literal(first.text[len(marker) :]), *rest)
