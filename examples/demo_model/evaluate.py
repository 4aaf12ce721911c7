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
from examples.demo_model.skills.cases import SPARE_TOKENS, Score, SkillCase, skill_cases
from examples.demo_model.tokenizer import TEMPLATE, renderer

NEW_TOKENS = 160  # enough for every chain of thought and tool call
# Problems of each kind; from this on two-digit addition is scored on every held-out pair
FULL = 200
FILLER_TOKENS = 1_000
UNENDED = "<|unended|>"  # no right answer ends in this


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
    """Renders questions as the server would.

    Attributes:
        template: the compiled chat template.
    """

    def __init__(self, template: Path = TEMPLATE) -> None:
        self.template = renderer(template)

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """The prompt of a conversation whose next turn is the assistant's."""
        return self.template.render(
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


def limit(tokenizer: Tokenizer, case: Case | SkillCase) -> int:
    """Tokens that a right answer can need; whatever is longer is wrong."""
    if isinstance(case, SkillCase):
        return len(tokenizer.encode(case.text).ids) + SPARE_TOKENS
    if "thinking" in case.task or "tool call" in case.task:
        return NEW_TOKENS
    return len(tokenizer.encode(case.expected).ids) + 4


def score_of(case: Case | SkillCase, answer: str, ended: bool, scores: Score) -> bool:
    """Count an answer; whether it is right. One without its end token is not."""
    if isinstance(case, SkillCase):
        return case.score(answer if ended else answer + UNENDED, scores)
    right = ended and read(answer, case.expected) == case.expected
    score = scores.setdefault(case.task, {"correct": 0, "total": 0})
    score["total"] += 1
    score["correct"] += right
    return right


def evaluate(
    folder: Path, count: int = FULL, skills: int = 0, seed: int = 5, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Metrics by task, with a few failures of each for a human to read. `skills`: conversations
    with tools and schemas of each kind, which only a model that has learnt them can answer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts, rng = Prompts(folder / "chat_template.jinja"), random.Random(seed)
    model = load(folder, dtype)
    stop = tuple(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
    cases: list[Case | SkillCase] = [
        *addition_cases(prompts, rng, count),
        *task_cases(prompts, rng, count),
        *tool_cases(prompts, rng, count),
        *skill_cases(prompts.template, random.Random(seed), skills),
    ]
    encoded = [tokenizer.encode(case.prompt, add_special_tokens=False).ids for case in cases]
    answers = greedy(model, encoded, [limit(tokenizer, case) for case in cases], stop)
    scores: dict[str, Score] = {"tasks": {}, "skills": {}}
    failures: dict[str, list[list[Any]]] = {}
    for case, ids in zip(cases, answers, strict=True):
        ended = bool(ids) and ids[-1] in stop
        answer = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        group = scores["skills" if isinstance(case, SkillCase) else "tasks"]
        if not score_of(case, answer, ended, group):
            failed = failures.setdefault(case.task, [])
            wanted = case.text if isinstance(case, SkillCase) else case.expected
            if len(failed) < 5:
                failed.append([case.prompt[-160:], wanted, answer])
    metrics = {
        "dtype": jnp.dtype(dtype).name,
        "seed": seed,
        "device": jax.devices()[0].device_kind,
    } | {name: dict(sorted(group.items())) for name, group in scores.items() if group}
    return {"metrics": metrics, "failures": failures}


def main() -> None:
    """Evaluate, print a table, write the metrics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("jaxllm/demo"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--failures", type=Path)
    parser.add_argument("--count", type=int, default=FULL, help="problems of each task")
    parser.add_argument("--skills", type=int, default=0, help="conversations of each skill")
    arguments = parser.parse_args()
    result = evaluate(arguments.model, arguments.count, arguments.skills)
    metrics = result["metrics"]
    for task, score in (metrics["tasks"] | metrics.get("skills", {})).items():
        print(
            f"{task:60} {score['correct']:5} of {score['total']:5}  "
            f"{100 * score['correct'] / score['total']:6.2f} %"
        )
    for path, key in ((arguments.out, "metrics"), (arguments.failures, "failures")):
        if path is not None:
            path.write_text(json.dumps(result[key], indent=2) + "\n")


if __name__ == "__main__":
    main()
