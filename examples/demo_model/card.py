"""Writes the model card from the evaluator's metrics and the trainer's record, so that no number in
it is typed by hand.

python -m examples.demo_model.card --out jaxllm/demo/README.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = ("training_before.json", "training.json")

TEXT = """# The demo model of jaxllm

A Qwen3-architecture model of {parameters:.1f} million parameters ({megabytes:.1f} MB, bfloat16), \
trained from scratch on
generated text. It is there so that an engine, a client or a test has something small that \
answers rightly; it is no assistant. It
knows short arithmetic, sorting, reversing and counting, small JSON objects, some facts, \
`<think>` steps and tool calls in two formats,
and says so when asked for anything else.

| | |
|---|---|
| shape | {layers} layers, width {width}, {heads} query heads and {kv} key-value heads of {dim}, \
MLP {inner}, vocabulary {vocab} (tied) |
| context | {context} tokens; trained on rows of {lengths} |
| prompt format | ChatML; `enable_thinking` (off unless asked for) makes it write `<think>` steps \
first; tools in OpenAI's form |
| stops at | `<|im_end|>` in chats, `<|endoftext|>` in plain text |
| training | {runs} |
| made by | `examples/demo_model`; data, weights and code are the project's own, under its \
licence |

## Held-out accuracy

Exact match of the whole answer, greedy decoding in {dtype} on one {metrics_device}, written by \
the evaluator. A tenth of all
problems, chosen by a hash of the operands (in either order) or of the word and never of the \
phrasing, is left out of the training
text; these are such problems. Single-digit arithmetic and the multiplication table up to 12 are \
always trained on, and so are the
facts of the tasks marked "seen facts". Tools, cities, colours and prices are drawn at random and \
not split; the products given to
the calculator are. Products by a multiple of ten, and differences of a teen and a digit, also \
occur as steps of longer problems.

| task | right | of | % |
|---|---:|---:|---:|
{table}

Products of two factors above 12 are declined without thinking or a calculator tool. Quotients \
and products whose table entry was
left out are the weak spot without thinking, as are the letters of words that the training text \
never spelled. Any answer can be
wrong.
"""

SKILLS = """
## Tools and schemas

Answers to held-out conversations, as the server's parsers read them: every call with its name and \
arguments, or the whole text; JSON
with its keys in the schema's order. A third of the conversations think; their thought must begin \
and end. Calls in JSON are the default;
`{{"tool_format": "xml"}}` in `chat_template_kwargs`, or the server's \
`--default-chat-template-kwargs`, asks for Qwen3-Coder's format, which
`--tool-call-parser qwen3_coder` reads. A tenth of the arguments of each tool, of the names of \
invented tools and of the records is left
out of the training text; the phrases, the names of ordinary tools and small talk are not split.

| task | right | of | % |
|---|---:|---:|---:|
{table}
"""


def table(tasks: dict[str, dict[str, int]]) -> str:
    """One row a task, the two-digit additions first."""
    order = sorted(tasks, key=lambda task: (not task.startswith("two-digit addition"), task))
    return "\n".join(
        f"| {task} | {right} | {total} | {100 * right / total:.1f} |"
        for task in order
        for right, total in [(tasks[task]["correct"], tasks[task]["total"])]
    )


def run(training: dict[str, Any]) -> str:
    """One run of training in words."""
    recipe = training["recipe"]
    return (
        f"{recipe['steps']:,} steps of {recipe['tokens']:,} tokens out of "
        f"{training['tokens'] / 1e6:.0f} million generated tokens, {training['seconds']} s on one "
        f"{training['device']}"
    )


def card(
    config: dict[str, Any],
    metrics: dict[str, Any],
    trainings: list[dict[str, Any]],
    weight_bytes: int,
) -> str:
    """The card's text. `trainings` are the records of the runs, each from the weights of the one
    before."""
    text = TEXT.format(
        parameters=weight_bytes / 2e6,
        megabytes=weight_bytes / 1e6,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv=config["num_key_value_heads"],
        dim=config["head_dim"],
        inner=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        lengths=", ".join(map(str, trainings[-1]["recipe"]["lengths"])),
        runs="; then, on more kinds of text, ".join(map(run, trainings)),
        dtype=metrics["dtype"],
        metrics_device=metrics["device"],
        table=table(metrics["tasks"]),
    )
    if "skills" in metrics:
        text += SKILLS.format(table=table(metrics["skills"]))
    return text


def current(folder: Path) -> str:
    """The card of the model in `folder`, from the metrics and the training records kept beside this
    file."""
    read = lambda path: json.loads(path.read_text())
    size = (folder / "model.safetensors").stat().st_size
    return card(
        read(folder / "config.json"),
        read(HERE / "metrics.json"),
        [read(HERE / name) for name in RUNS],
        size,
    )


def main() -> None:
    """Write the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("jaxllm/demo"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(current(arguments.model))


if __name__ == "__main__":
    main()
