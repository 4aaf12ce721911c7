"""Draw docs/plots/*.svg from the recorded results: `python -m benchmarks.plots`. Needs matplotlib
(the `bench` extra)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.record import RESULTS
from benchmarks.report import ceilings, engines, rate, records

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
COLOURS = ("#1f6feb", "#9a9a9a", "#d4a72c")  # jaxllm first
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxllm",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}

type Records = list[dict[str, Any]]


ACROSS = 4  # panels beside each other


def tpot(found: Records, plt: Any) -> Any:
    """Milliseconds per token by batch at 1,024 tokens, a panel per shape; None without figures of
    ours.
    """
    ours, others = compare.split(engines(found))
    rows = {
        r["engine"]: [row for row in r.get("rows", ()) if at_1024(row)]
        for r in (ours, *others)
        if r
    }
    shapes = sorted({row["shape"] for row in rows.get(compare.OURS, ())})
    if not shapes:
        return None
    lines = -(-len(shapes) // ACROSS)
    figure, panels = plt.subplots(lines, ACROSS, figsize=(4 * ACROSS, 3.2 * lines), squeeze=False)
    for unused in panels.flat[len(shapes) :]:
        unused.set_axis_off()
    for panel, shape in zip(panels.flat, shapes, strict=False):
        for colour, engine in zip(COLOURS, rows, strict=False):
            points = sorted(
                (row["batch"], row["value"]) for row in rows[engine] if row["shape"] == shape
            )
            panel.plot(
                [batch for batch, _ in points],
                [value for _, value in points],
                marker="o",
                color=colour,
                label=engine,
            )
        batches = sorted({row["batch"] for row in rows[compare.OURS]})
        panel.set(title=shape, xlabel="batch", ylabel="TPOT, ms", xscale="log", ylim=(0, None))
        panel.set_xticks(batches, [str(batch) for batch in batches], minor=False)
        panel.minorticks_off()
    panels[0][0].legend()
    return figure


def at_1024(row: compare.Row) -> bool:
    """Whether it is a TPOT of the comparison by batch."""
    return row["figure"] == "tpot_ms" and row["context"] == 1024


def throughput(found: Records, plt: Any) -> Any:
    """Output tokens per second of every load, a panel per shape; None without figures of ours."""
    ours, others = compare.split(engines(found))
    kinds = ("throughput", "fixed256", "http_tok_s")
    shapes = sorted({row["shape"] for row in ours.get("rows", ()) if row["figure"] in kinds})
    if not shapes:
        return None
    keys = {
        shape: [row for row in ours["rows"] if row["figure"] in kinds and row["shape"] == shape]
        for shape in shapes
    }
    height = 1.1 + 0.32 * max(map(len, keys.values()))
    figure, panels = plt.subplots(len(shapes), 1, figsize=(8, height * len(shapes)), squeeze=False)
    for panel, shape in zip(panels[:, 0], shapes, strict=True):
        for offset, record in enumerate((ours, *others)):
            values = {compare.key(row): row["value"] for row in record["rows"]}
            bars = [values.get(compare.key(row), 0) for row in keys[shape]]
            at = [index + offset * 0.38 for index in range(len(bars))]
            panel.barh(at, bars, height=0.36, color=COLOURS[offset], label=record["engine"])
        panel.set_yticks(
            [index + 0.19 for index in range(len(keys[shape]))], [short(row) for row in keys[shape]]
        )
        panel.invert_yaxis()
        panel.set(title=shape, xlabel="output tokens/s")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def short(row: compare.Row) -> str:
    """The load of a throughput row in a few words."""
    return {
        "throughput": "mixed lengths",
        "fixed256": "256 tokens each",
        "http_tok_s": "mixed lengths, HTTP",
    }[row["figure"]] + (f", {row['mode']}" if "mode" in row else "")


def kernels(found: Records, plt: Any) -> Any:
    """Each kernel's rate as a share of what its machine does at best; None without timed kernels on
    a machine whose best is known."""
    bars, limits = [], ceilings(found)
    for record in (r for r in found if r.get("mode") == "time" and r["device"] in limits):
        for row in record["rows"]:
            if (unit := rate(row)) in limits[record["device"]]:
                where = " ".join(
                    f"{name}{row[name]}" for name in row if name not in ("op", "us", "tuning", unit)
                )
                bars.append(
                    (
                        f"{row['op']} {where}",
                        row[unit] / limits[record["device"]][unit],
                        f"{row[unit]:g} {unit}",
                    )
                )
    if not bars:
        return None
    figure, panel = plt.subplots(figsize=(8, 0.8 + 0.22 * len(bars)))
    panel.barh(range(len(bars)), [share for _, share, _ in bars], color=COLOURS[0])
    for index, (_, share, text) in enumerate(bars):
        panel.text(share + 0.01, index, text, va="center", fontsize=7)
    panel.axvline(1, color="black", linewidth=1)
    panel.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=7)
    panel.invert_yaxis()
    panel.set(xlabel="share of the machine's measured ceiling", xlim=(0, 1.25))
    notes = sorted({r["note"] for r in found if r.get("mode") == "time" and "note" in r})
    panel.set_title("\n".join(notes), fontsize=7)
    return figure


DRAWN: dict[str, Callable[[Records, Any], Any]] = {
    "tpot": tpot,
    "throughput": throughput,
    "kernels": kernels,
}


def draw(results: Path, folder: Path) -> list[Path]:
    """Write every plot that has figures; returns the files. Raises ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found, written = records(results), []
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, make in DRAWN.items():
            if (figure := make(found, plt)) is not None:
                written.append(folder / f"{name}.svg")
                figure.savefig(written[-1], metadata={"Date": None})
                plt.close(figure)
    return written


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, default=PLOTS)
    a = parser.parse_args()
    try:
        print(*draw(a.results, a.folder), sep="\n")
    except ImportError:
        raise SystemExit(
            "matplotlib is not installed; make setup EXTRAS=bench installs it"
        ) from None


if __name__ == "__main__":
    main()
