"""What each mode costs, from the recorded results: the table of docs/modes.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import FIGURES, Row, label
from benchmarks.record import RESULTS

SAMPLING = {
    "temperature0.6": "temperature 0.6",
    "topp0.9": "top_p 0.9",
    "topk50_topp0.9": "top_k 50 and top_p 0.9",
    "minp0.05": "min_p 0.05",
    "seeded": "a seed per request",
    "penalties": "penalties",
    "logprobs5": "five log-probabilities a token",
}


class Cost(NamedTuple):
    """One measured figure with a mode and without.

    Attributes:
      mode: the mode, as the table names it.
      load: what ran, and the unit of the figures.
      without, with_mode: the figures; None = not measured.
      higher_is_better: whether the unit counts up (tokens/s) or down (ms, s).
      source: file of the record, or the section of benchmarks/LOG.md.
    """

    mode: str
    load: str
    without: float | None
    with_mode: float | None
    higher_is_better: bool
    source: str


def sampling(record: dict[str, Any], source: str) -> list[Cost]:
    """Sampling options against greedy, from the record of an engine."""
    rows = {row["mode"]: row["value"] for row in record["rows"] if row["figure"] == "fixed256"}
    load = "7B, " + FIGURES["fixed256"].text.removesuffix(", {mode}")
    return [
        Cost(name, load, rows["greedy"], rows[mode], True, source)
        for mode, name in SAMPLING.items()
        if mode in rows
    ]


def engine(record: dict[str, Any], source: str) -> list[Cost]:
    """Sampling options, and weights in few bits."""
    return sampling(record, source) + few_bits(record, source)


def few_bits(record: dict[str, Any], source: str) -> list[Cost]:
    """Shapes whose name says in what their weights are, against the same shapes in bfloat16."""
    loads: dict[tuple[str, str], Row] = {
        (row["shape"], label(row)): row
        for row in record["rows"]
        if row["figure"] in ("ttft_ms", "tpot_ms")
    }
    return [
        Cost(f"weights in {bits}", f"{model}, {load}", plain["value"], row["value"], False, source)
        for (shape, load), row in loads.items()
        for model, _, bits in [shape.partition(" in ")]
        if bits and (plain := loads.get((model, load)))
    ]


def structured(record: dict[str, Any], source: str) -> list[Cost]:
    """Structured output against free text."""
    figures, rows = record["figures"], record["arguments"]["batch_size"]
    load = f"7B, batch of {rows}, output tokens/s"
    return [
        Cost(
            "structured output, all rows",
            load,
            figures["free_tok_s"],
            figures["guided_tok_s"],
            True,
            source,
        ),
        Cost(
            "structured output, half of the rows",
            load,
            figures["free_tok_s"],
            figures["mixed_tok_s"],
            True,
            source,
        ),
    ]


def invariance(record: dict[str, Any], source: str) -> list[Cost]:
    """The batch-invariant mode, with requests one by one and all at once."""
    usual, invariant = record["figures"]["usual"], record["figures"]["invariant"]
    count = record["arguments"]["num_prompts"]
    loads = {"alone": "one request at a time", "crowd": f"{count} requests at once"}
    return [
        Cost(
            "batch-invariant",
            f"7B, {load}, output tokens/s",
            usual[f"{key}_tok_s"],
            invariant[f"{key}_tok_s"],
            True,
            source,
        )
        for key, load in loads.items()
    ]


def swap(record: dict[str, Any], source: str) -> list[Cost]:
    """Preemption by swap against preemption by recomputation."""
    recompute, swapped = record["figures"]["eager-recompute"], record["figures"]["eager-swap"]
    model = str(record["arguments"]["model"]).removeprefix("shape:")
    counts = f"{recompute['preemptions']} and {swapped['preemptions']} preemptions"
    load = f"{model}, overfull pool, {counts}, output tokens/s"
    unit = "output_tokens_per_second"
    return [
        Cost(
            "preemption by swap instead of recomputation",
            load,
            recompute[unit],
            swapped[unit],
            True,
            source,
        )
    ]


def noted(record: dict[str, Any], source: str) -> list[Cost]:
    """Figures that were read off a run and noted in benchmarks/LOG.md."""
    del source
    return [
        Cost(row["mode"], row["load"], row["without"], row["with"], False, row["source"])
        for row in record["rows"]
    ]


READERS = {
    "engine-jaxllm-h200": engine,
    "structured-7b-h200": structured,
    "invariance-7b-h200": invariance,
    "overcommit-7b-h200": swap,
    "overcommit-0.6b-h200": swap,
    "modes-noted-h200": noted,
}


def costs(results: Path = RESULTS) -> list[Cost]:
    """All costs that are recorded."""
    found = []
    for name, read in READERS.items():
        path = results / f"{name}.json"
        if path.exists():
            found += read(json.loads(path.read_text()), f"`{path.name}`")
    return found


def change(cost: Cost) -> str:
    """How much better (+) or worse (−) the mode makes the figure."""
    if cost.without is None or cost.with_mode is None:
        return "not measured"
    ratio = (
        cost.with_mode / cost.without if cost.higher_is_better else cost.without / cost.with_mode
    )
    return f"{ratio - 1:+.1%}".replace("-", "−").replace("%", " %")


def table(results: Path = RESULTS) -> str:
    """The costs as a Markdown table."""
    lines = [
        "| mode | load and unit | without | with | speed | source |",
        "|---|---|---|---|---|---|",
    ]
    shown = lambda value: "–" if value is None else f"{value:,.10g}"
    lines += [
        f"| {c.mode} | {c.load} | {shown(c.without)} | {shown(c.with_mode)} | {change(c)} "
        f"| {c.source} |"
        for c in costs(results)
    ]
    return "\n".join(lines)


def accuracy(results: Path = RESULTS) -> str:
    """What formats of weights and pages change, as a Markdown table."""
    path = results / "weight-accuracy-demo-cpu.json"
    lines = [
        "| format | perplexity | change | of answers | their tokens that are likeliest |",
        "|---|---|---|---|---|",
    ]
    for row in json.loads(path.read_text())["figures"] if path.exists() else ():
        change = f"{row['perplexity_change']:+.2%}".replace("-", "−").replace("%", " %")
        right = row["answer_tokens_right"]
        lines.append(
            f"| {row['format']} | {row['perplexity']:.1f} | {change} "
            f"| {row['perplexity_of_answers']:.5f} | {'–' if right is None else f'{right:.2%}'} |"
        )
    return "\n".join(lines)
