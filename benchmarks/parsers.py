"""What reading reasoning and tool calls costs: tokens a second and core, fed token by token.

    python -m benchmarks.parsers --save

Four characters are taken for a token. `plain` is text without calls, through the whole pipeline;
`call` is the inside of one long call: arguments of many short values, and one long string.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from benchmarks.record import finish, parser
from jaxllm.grammar.pieces import Arguments, Either, FreeText, Json, Literal, Maybe, OneOf, Pieces
from jaxllm.server.parsing.pipeline import Pipeline, pipeline
from jaxllm.server.parsing.registry import find_reasoning, tool_formats

TOKEN = 4  # characters
ROUNDS = 5
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps (for 8 hours).\n"
CODE = "def f(x):\n    if x < 3 and y > 4:\n        return {'a': [x, \"b\"]}\n\n"


def speed(make: Callable[[], Pipeline], text: str, skip: int = 0) -> int:
    """Tokens a second behind the first `skip` characters, the best of some rounds."""
    pieces = [text[at : at + TOKEN] for at in range(skip, len(text), TOKEN)]
    best = 0.0
    for _ in range(ROUNDS):
        own = make()
        own.feed(text[:skip])
        begin = time.process_time()
        for piece in pieces:
            own.feed(piece)
        best = max(best, len(pieces) / (time.process_time() - begin))
    return int(best)


def call_text(pieces: Pieces, values: dict[str, str]) -> str:
    """One call as a grammar would write it."""
    waiting = iter(values.values())
    out = []
    for piece in pieces:
        if isinstance(piece, Literal):
            out.append(piece.text)
        elif isinstance(piece, FreeText):
            out.append(next(waiting))
        elif isinstance(piece, Json):
            whole = piece.schema.get("type") == "object"
            out.append(json.dumps(values if whole else next(waiting)))
        elif isinstance(piece, Arguments):
            layout = piece.layout
            before, behind = layout.text or layout.json
            written = values if layout.text else {key: json.dumps(values[key]) for key in values}
            arguments = (layout.before_key + key + before + written[key] + behind for key in values)
            out.append(layout.comma.join(arguments))
        elif isinstance(piece, Either):
            out.append(call_text(piece.options[0], values))
        else:
            assert not isinstance(piece, Maybe | OneOf)
    return "".join(out)


def main() -> None:
    """Parses the command line and prints the table."""
    arguments = parser(__doc__).parse_args()
    reasoning = find_reasoning("qwen3", None)
    figures: dict[str, dict[str, int]] = {}
    for name, own in tool_formats().items():
        many = {f"key_{n}": f"value {n}" for n in range(2_000)}
        figures[name] = {}
        for kind, values in (("values", many), ("string", {"code": CODE * 500})):
            properties = {key: {"type": "string"} for key in values}
            schema = {"type": "object", "properties": properties, "required": list(values)}
            tools = {"run": schema}

            def make(own: type = own, tools: dict = tools) -> Pipeline:
                return pipeline(reasoning, own, "<think>\n\n</think>", tools)

            call = own.section.begin + call_text(own.pieces("run", schema, 0), values)
            figures[name][f"call, {kind}"] = speed(make, call)
        figures[name]["plain"] = speed(make, WORDS * 1_000)
        print(name, figures[name])
    finish("parsers", arguments, figures)


if __name__ == "__main__":
    main()
