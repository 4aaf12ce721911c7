"""The tables of docs/answers.md: what answers may be, the formats, and which schemas hold."""

from __future__ import annotations

from itertools import product

from jaxllm.server.parsing.registry import tool_formats
from tools.answer_matrix import CHOICES, ONE_CALL, WITHOUT_MARKER, Request, promise
from tools.argument_schemas import argument_schemas, verdicts

MARKED = "hermes"  # stands for all formats with a marker
UNMARKED = "llama3_json"  # and this one for those without
FORMS = {False: "none", True: "JSON schema"}


def answers() -> str:
    """One row for each request: what an answer is, where a marker begins calls and where none."""
    lines = [
        "| `tool_choice` | a tool is `strict` | `response_format` | formats with a marker "
        "| formats without |",
        "|---|---|---|---|---|",
    ]
    for choice in CHOICES:
        rows: dict[tuple[str, str], list[Request]] = {}
        for strict, structure in product((False, True), (False, True)):
            request = Request(choice, strict, structure)
            promised = (promise(MARKED, request).words, promise(UNMARKED, request).words)
            rows.setdefault(promised, []).append(request)
        asked = "a tool's name" if choice == "named" else f"`{choice}`"
        for promised, requests in rows.items():
            stricts = {request.strict for request in requests}
            structures = {request.structure for request in requests}
            strict_words = "either" if len(stricts) == 2 else "yes" if True in stricts else "no"
            form = "either" if len(structures) == 2 else FORMS[True in structures]
            lines.append(f"| {' | '.join((asked, strict_words, form, *promised))} |")
    return "\n".join(lines)


def formats() -> str:
    """One row for each format of calls."""
    lines = [
        "| format | other names | calls begin with | a marker | demanded calls in one answer |",
        "|---|---|---|---|---|",
    ]
    for name, parser in tool_formats().items():
        columns = (
            f"`{name}`",
            ", ".join(f"`{alias}`" for alias in parser.aliases) or "–",
            " or ".join(f"`{marker}`" for marker in parser.open).replace("|", "\\|") or "–",
            "no" if name in WITHOUT_MARKER else "yes",
            "one" if name in ONE_CALL else "several",
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def schemas() -> str:
    """One row for each thing that a schema says, one column for formats with equal verdicts."""
    groups: dict[tuple[bool, ...], list[str]] = {}
    for name, held in verdicts().items():
        groups.setdefault(tuple(held.values()), []).append(name)
    heads = [", ".join(f"`{name}`" for name in names) for names in groups.values()]
    lines = [f"| the schema asks for | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for number, words in enumerate(argument_schemas()):
        columns = ["held" if held[number] else "400" for held in groups]
        lines.append(f"| {words} | {' | '.join(columns)} |")
    return "\n".join(lines)
