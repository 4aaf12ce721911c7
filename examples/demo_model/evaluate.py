"""Exact-match accuracy on held-out problems, by greedy decoding. Writes a JSON that the card and
its test read.

python -m examples.demo_model.evaluate --model jaxllm/demo --out examples/demo_model/metrics.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from examples.demo_model import arithmetic, facts, generate, toolbox
from examples.demo_model.decode import greedy
from examples.demo_model.network import load
from examples.demo_model.problem import pair_held_out
from examples.demo_model.tokenizer import renderer

NEW_TOKENS = 160  # enough for every chain of thought and tool call
# Problems of each kind; from this on two-digit addition is scored on every held-out pair
FULL = 200
FILLER_TOKENS = 1_000


@dataclass(frozen=True)
class Case:
    """One scored prompt. `expected` is the text of the answer, or the parsed tool calls."""

    task: str
    prompt: str
    expected: Any


def addition_pairs() -> list[tuple[int, int]]:
    """Every held-out pair of two-digit numbers, both orders."""
    return [(a, b) for a in range(10, 100) for b in range(10, 100) if pair_held_out("add", a, b)]


class Prompts:
    """Renders questions as the server would."""

    def __init__(self) -> None:
        self._template = renderer()

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """The prompt of a conversation whose next turn is the assistant's."""
        return self._template.render(
            messages=messages, tools=tools, enable_thinking=thinking, add_generation_prompt=True
        )

    def ask(self, question: str, thinking: bool = False) -> str:
        """The prompt of one question."""
        return self.chat([{"role": "user", "content": question}], thinking=thinking)


def addition_cases(prompts: Prompts, rng: random.Random, count: int) -> Iterator[Case]:
    """Two-digit addition in its four settings: chat, thinking, plain completion, behind much other
    text."""
    pairs = addition_pairs()
    if count < FULL:
        pairs = rng.sample(pairs, count)
    filler = generate.filler(random.Random(3), 60)[: FILLER_TOKENS * 4]
    for a, b in pairs:
        question = arithmetic.problem(rng, "add", a, b).question
        yield Case("two-digit addition", prompts.ask(question), str(a + b))
        yield Case("two-digit addition, plain completion", f"{a} + {b} =", str(a + b))
    for a, b in rng.sample(pairs, min(count, len(pairs))):
        question = arithmetic.problem(rng, "add", a, b).question
        yield Case("two-digit addition, thinking", prompts.ask(question, thinking=True), str(a + b))
    for a, b in rng.sample(pairs, min(count // 2, len(pairs))):
        messages = [
            {"role": "system", "content": filler},
            {"role": "user", "content": f"What is {a} + {b}?"},
        ]
        yield Case(
            "two-digit addition after about 1,000 tokens of stories",
            prompts.chat(messages),
            str(a + b),
        )


def task_cases(prompts: Prompts, rng: random.Random, count: int) -> Iterator[Case]:
    """`count` distinct held-out problems of every other kind."""
    for kind, maker in generate.MAKERS.items():
        seen: set[str] = set()
        for _ in range(count * 20):
            if len(seen) == count:
                break
            problem = maker(rng, kind not in ("calendar", "fact"))
            if problem.question in seen or problem.task == "two-digit addition":
                continue
            seen.add(problem.question)
            task = problem.task + (" (seen facts)" if problem.task in facts.UNSPLIT_TASKS else "")
            yield Case(
                task,
                prompts.ask(problem.question, thinking=problem.task.startswith("long")),
                problem.answer,
            )


def tool_cases(prompts: Prompts, rng: random.Random, count: int) -> Iterator[Case]:
    """The calls that a question needs, and the reply once the tools have answered."""
    for _ in range(count):
        for task, kind in (
            ("calculator", toolbox.calculation),
            ("weather", toolbox.forecast),
            ("named tool", toolbox.lookup),
        ):
            tools, job = kind(rng, True)
            asked = [{"role": "user", "content": job.question}]
            yield Case(
                f"tool call: {task}",
                prompts.chat(asked, tools),
                [{"name": n, "arguments": a} for n, a in job.calls],
            )
            calls = [
                {"type": "function", "function": {"name": n, "arguments": a}} for n, a in job.calls
            ]
            answered = [*asked, {"role": "assistant", "content": None, "tool_calls": calls}]
            answered += [{"role": "tool", "content": result} for result in job.results]
            yield Case(f"reply from tool: {task}", prompts.chat(answered, tools), job.reply)


def read(text: str, expected: Any) -> Any:
    """What is scored of a generated text: the tool calls where some are expected, else the answer
    after any thinking."""
    if isinstance(expected, str):
        return text.split("</think>")[-1].strip()
    try:
        return [
            json.loads(call)
            for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        ]
    except json.JSONDecodeError:
        return text


def limit(tokenizer: Tokenizer, case: Case) -> int:
    """Tokens that a right answer can need; whatever is longer is wrong."""
    if "thinking" in case.task or "tool call" in case.task:
        return NEW_TOKENS
    return len(tokenizer.encode(case.expected).ids) + 4


def evaluate(
    folder: Path, count: int = FULL, seed: int = 5, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Metrics by task, with a few failures of each for a human to read."""
    tokenizer, prompts, rng = (
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        Prompts(),
        random.Random(seed),
    )
    model, stop = (
        load(folder, dtype),
        tuple(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]),
    )
    cases = [
        *addition_cases(prompts, rng, count),
        *task_cases(prompts, rng, count),
        *tool_cases(prompts, rng, count),
    ]
    encoded = [tokenizer.encode(case.prompt, add_special_tokens=False).ids for case in cases]
    answers = greedy(model, encoded, [limit(tokenizer, case) for case in cases], stop)
    tasks: dict[str, dict[str, int]] = {}
    failures: dict[str, list[list[Any]]] = {}
    for case, ids in zip(cases, answers, strict=True):
        ended = bool(ids) and ids[-1] in stop
        answer = read(
            tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False), case.expected
        )
        score = tasks.setdefault(case.task, {"correct": 0, "total": 0})
        score["total"] += 1
        if ended and answer == case.expected:
            score["correct"] += 1
        elif len(failures.setdefault(case.task, [])) < 5:
            failures[case.task].append([case.prompt[-160:], case.expected, answer])
    metrics = {
        "dtype": jnp.dtype(dtype).name,
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "tasks": dict(sorted(tasks.items())),
    }
    return {"metrics": metrics, "failures": failures}


def main() -> None:
    """Evaluate, print a table, write the metrics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("jaxllm/demo"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--failures", type=Path)
    parser.add_argument("--count", type=int, default=FULL)
    arguments = parser.parse_args()
    result = evaluate(arguments.model, arguments.count)
    for task, score in result["metrics"]["tasks"].items():
        print(
            f"{task:60} {score['correct']:5} of {score['total']:5}  "
            f"{100 * score['correct'] / score['total']:6.2f} %"
        )
    for path, key in ((arguments.out, "metrics"), (arguments.failures, "failures")):
        if path is not None:
            path.write_text(json.dumps(result[key], indent=2) + "\n")


if __name__ == "__main__":
    main()
