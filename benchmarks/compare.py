"""Engines beside each other: the figures that one driver took of each, as rows, and the tables that
compare them.

A row is one figure: {"shape", "figure", what it was measured at ("prompt", "batch", "context",
"mode", …), "value", "date"}. A record (`benchmarks/results/engine-*.json`) holds the rows of one
engine on one kind of machine. Newer rows replace older ones of the same figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

type Row = dict[str, Any]
type Key = tuple[tuple[str, Any], ...]

OURS = "jaxllm"
# What a row or a driver's line measured; all else says at what.
MEASUREMENT = (
    "value",
    "date",
    "min",
    "seconds",
    "tok_s",
    "out_tok_s",
    "total_tok_s",
    "in_tok",
    "out_tok",
    "note",
)


class Figure(NamedTuple):
    """How a figure is shown; `text` is filled from its row."""

    text: str
    higher: bool = False  # whether more is better


FIGURES: dict[str, Figure] = {
    "startup_s": Figure("start, caches empty, s"),
    "startup_again_s": Figure("start, second process, s"),
    "kv_tokens": Figure("KV tokens at 0.9 of the memory", higher=True),
    "ttft_ms": Figure("TTFT ms, prompt {prompt}"),
    "ttft_cached_ms": Figure("TTFT ms, prompt {prompt}, all but 92 cached"),
    "tpot_ms": Figure("TPOT ms, {batch} × {context}"),
    "throughput": Figure("{prompts} mixed prompts, output tokens/s, {mode}", higher=True),
    "fixed256": Figure("256 prompts × 256 tokens, output tokens/s, {mode}", higher=True),
    "multi_turn": Figure("{turns} turns of {users} users from {start} tokens, s"),
    "http_tok_s": Figure("{prompts} mixed prompts over HTTP, output tokens/s", higher=True),
    "http_ttft_p50_ms": Figure("{rate:g} requests/s over HTTP, TTFT ms, median"),
    "http_ttft_p99_ms": Figure("{rate:g} requests/s over HTTP, TTFT ms, p99"),
    "http_tpot_p50_ms": Figure("{rate:g} requests/s over HTTP, TPOT ms, median"),
    "http_itl_p99_ms": Figure("{rate:g} requests/s over HTTP, ITL ms, p99"),
}


def key(row: Row) -> Key:
    """What was measured: equal keys are the same figure."""
    return tuple(sorted((name, value) for name, value in row.items() if name not in MEASUREMENT))


def merge(older: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """Every figure once, in the order of FIGURES; the newer one where both have it."""
    rows = {key(row): row for row in [*older, *newer]}
    return sorted(rows.values(), key=order)


def order(row: Row) -> tuple[Any, ...]:
    """Sorts rows by shape, figure and size."""
    sizes = [row.get(name, 0) for name in ("context", "batch", "prompt", "rate", "start")]
    return (str(row["shape"]), list(FIGURES).index(row["figure"]), *sizes)


def ratio(row: Row, ours: float, theirs: float) -> float:
    """How many times better ours is, to two places; below 1 it is worse."""
    return round(ours / theirs if FIGURES[row["figure"]].higher else theirs / ours, 2)


def label(row: Row) -> str:
    """The figure in words."""
    return FIGURES[row["figure"]].text.format(**row)


def tables(records: list[dict[str, Any]]) -> str:
    """A table per shape that any engine has, with the ratio of jaxllm to each other engine; empty
    without our figures."""
    ours, others = split(records)
    if not ours:
        return ""
    parts = [
        _table(shape, ours, others)
        for shape in sorted({row["shape"] for record in (ours, *others) for row in record["rows"]})
    ]
    notes = [
        f"{record['engine']}: {record['how']} {_dates(record['rows'])}.{_aside(record['rows'])}"
        for record in (ours, *others)
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)])


# The columns of the summary: a title, and what rows of it are
SUMMARY: dict[str, dict[str, Any]] = {
    **{
        f"TPOT ms, {batch}": {"figure": "tpot_ms", "batch": batch, "context": 1024}
        for batch in (1, 16, 64, 256)
    },
    **{f"TTFT ms, {prompt:,}": {"figure": "ttft_ms", "prompt": prompt} for prompt in (512, 8192)},
    "tokens/s": {"figure": "throughput", "mode": "greedy"},
}


def summary(records: list[dict[str, Any]], shapes: Container[str] | None = None) -> str:
    """One row per shape that we have figures of, or of those in `shapes`, with `ours / theirs` in
    each cell; empty without our figures."""
    ours, others = split(records)
    if not ours:
        return ""
    engines = [ours, *others]
    lines = [
        f"| {ours['machine']}, {' / '.join(engine['engine'] for engine in engines)} | "
        + " | ".join(SUMMARY)
        + " |",
        "|" + "---|" * (len(SUMMARY) + 1),
    ]
    for shape in sorted({row["shape"] for row in ours["rows"]}):
        if shapes is not None and shape not in shapes:
            continue
        cells = [_cell(shape, column, engines) for column in SUMMARY.values()]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(shape: str, column: dict[str, Any], engines: list[dict[str, Any]]) -> str:
    """The figure of each engine; a dash where none has it."""
    wanted = {"shape": shape, **column}.items()
    found = [
        number(next((row for row in engine["rows"] if wanted <= row.items()), None))
        for engine in engines
    ]
    return "–" if set(found) == {"–"} else " / ".join(found)


def headline(records: list[dict[str, Any]]) -> str:
    """One sentence per other engine: in how many figures jaxllm is ahead, and every figure in which
    it is not."""
    ours, others = split(records)
    lines = []
    for other in others if ours else ():
        theirs = {key(row): row["value"] for row in other["rows"]}
        pairs = [
            (row, ratio(row, row["value"], theirs[key(row)]))
            for row in ours["rows"]
            if key(row) in theirs
        ]
        if not pairs:
            continue
        ahead = sum(found > 1 for _, found in pairs)
        behind = [
            f"{row['shape']} {label(row)} ({found:.2f}×)" for row, found in pairs if found < 1
        ]
        verdict = "Faster than" if ahead > len(behind) else "Not yet faster than"
        middle = statistics.median(found for _, found in pairs)
        text = (
            f"{verdict} {other['engine']} on one {ours['machine']} in {ahead} of "
            f"[{len(pairs)} figures](docs/figures.md), median "
        )
        lines.append(
            f"{text}{middle:.2f}×. Behind in {len(behind)}: {'; '.join(behind)}."
            if behind
            else f"{text}{middle:.2f}×."
        )
    return "\n\n".join(lines)


def split(records: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Our record ({} when there is none), and those of other engines on the same machine."""
    ours: dict[str, Any] = next((record for record in records if record["engine"] == OURS), {})
    return ours, [
        record
        for record in records
        if record["engine"] != OURS and record["machine"] == ours.get("machine")
    ]


def _table(shape: str, ours: dict[str, Any], others: list[dict[str, Any]]) -> str:
    columns = [
        {key(row): row for row in record["rows"] if row["shape"] == shape}
        for record in (ours, *others)
    ]
    rows = merge([row for column in columns[1:] for row in column.values()], columns[0].values())
    head = ["figure", OURS, *(name for other in others for name in (other["engine"], "ratio"))]
    lines = [
        f"{shape} shape, random weights, {ours['machine']}:",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in rows:
        mine, *rest = [column.get(key(row)) for column in columns]
        cells = [label(row), number(mine)]
        for theirs in rest:
            cells += [
                number(theirs),
                f"{ratio(row, mine['value'], theirs['value']):.2f}×" if mine and theirs else "–",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(row: Row | None) -> str:
    """The value, with as many digits as it deserves."""
    if row is None:
        return "–"
    value = float(row["value"])
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _aside(rows: list[Row]) -> str:
    """What must be known about single figures: which are older than the latest of their engine, and
    the notes of rows."""
    older = "; ".join(_older(rows))
    since = min(row["date"] for row in rows)
    told = [f" Not measured again since {since}: {older}."] if older else []
    told += [f" {row['shape']} {label(row)}: {row['note']}." for row in rows if "note" in row]
    return "".join(told)


def _older(rows: list[Row]) -> Iterator[str]:
    """The figures before the latest day: a shape's by its name alone where all are."""
    latest = max(row["date"] for row in rows)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        old = [label(row) for row in own if row["date"] < latest]
        if len(old) == len(own):
            yield shape
        elif old:
            yield f"{shape} ({'; '.join(old)})"


def _dates(rows: list[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    return (
        f"Measured on {dates[0]}" if len(dates) == 1 else f"Measured from {dates[0]} to {dates[-1]}"
    )
