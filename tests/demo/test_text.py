"""The generated text: the same for a seed, right in every answer, and without a single held-out
problem."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo_model import arithmetic, facts, generate, lists, words
from examples.demo_model.generate import MAKERS, corpus
from examples.demo_model.problem import held_out, pair_held_out
from examples.demo_model.skills.corpus import corpus as mixed_corpus

SEEDS = st.integers(0, 2**32)
OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}


def every_text(sample: generate.Sample) -> str:
    """All that the document says, tool results and thoughts included."""
    parts = [sample.text]
    for message in sample.messages:
        parts += [
            message["content"],
            message.get("reasoning_content", ""),
            json.dumps(message.get("tool_calls", "")),
        ]
    return "\n".join(parts)


def names_all(question: str, items: list[str]) -> bool:
    """Whether the question names every one of the items."""
    return all(
        re.search(rf"(?<!\w){re.escape(item)}(?!\w)", question, re.IGNORECASE) for item in items
    )


def test_a_seed_gives_one_corpus():
    assert list(corpus(3, 300)) == list(corpus(3, 300))
    assert list(corpus(3, 300)) != list(corpus(4, 300))


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 999), st.integers(0, 999), SEEDS)
def test_arithmetic_answers_agree_with_python(operation, a, b, seed):
    problem = arithmetic.problem(random.Random(seed), operation, a, b)
    right = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
    assert problem.answer == str(right)
    assert str(a) in problem.question and str(b) in problem.question


def value_of(expression: str) -> int:
    """A number, a difference, a quotient, or a sum of products."""
    if match := re.fullmatch(r"(\d+) ([-/]) (\d+)", expression):
        a, b = int(match[1]), int(match[3])
        return a - b if match[2] == "-" else a // b
    return sum(math.prod(map(int, term.split(" * "))) for term in expression.split(" + "))


@given(st.sampled_from([*sorted(arithmetic.MAKERS), "long_multiplication", "small_sum"]), SEEDS)
def test_every_equation_in_a_chain_of_thought_holds(kind, seed):
    problem = MAKERS[kind](random.Random(seed), False)
    equations = re.findall(r"(?<!\S)(\d+(?: [-+*/] \d+)+) = (-?\d+(?: [+*] \d+)*)", problem.thought)
    assert equations
    for left, right in equations:
        assert value_of(left) == value_of(right), problem.thought
    assert re.findall(r"-?\d+", problem.thought)[-1] == problem.answer


@given(SEEDS)
def test_sorted_numbers_are_the_same_numbers_in_order(seed):
    problem = lists.sort_numbers(random.Random(seed), False)
    asked = [int(n) for n in re.findall(r"\d+", problem.question)]
    assert problem.answer in (
        ", ".join(map(str, sorted(asked))),
        ", ".join(map(str, sorted(asked, reverse=True))),
    )
    down = re.search("descending|largest to|high to", problem.question)
    assert [int(n) for n in problem.answer.split(", ")] == sorted(asked, reverse=bool(down))


@given(SEEDS)
def test_sorted_words_are_in_alphabetical_order_and_all_asked_for(seed):
    problem = words.sort_words(random.Random(seed), False)
    answer = problem.answer.split(", ")
    assert answer == sorted(answer) and names_all(problem.question, answer)


@given(SEEDS)
def test_letters_are_reversed_spelled_and_counted_rightly(seed):
    rng = random.Random(seed)
    reversed_word, spelled = words.reverse(rng, False), words.spell(rng, False)
    assert names_all(reversed_word.question, [reversed_word.answer[::-1]])
    assert names_all(spelled.question, [spelled.answer.replace("-", "")])
    counted, measured = words.count_letter(rng, False), words.length(rng, False)
    word = "".join(re.findall(r"(?:^|, )([a-z])", counted.thought.split(". ")[0]))
    assert names_all(counted.question, [word])
    letters = set(re.findall(r"\b([a-z])(?='?s\b|\b)", counted.question))
    assert int(counted.answer) in {word.count(letter) for letter in letters}
    assert int(measured.answer) == max(int(n) for n in re.findall(r"\d+", measured.thought))


@given(st.sampled_from(["person_json", "thing_json"]), SEEDS)
def test_json_answers_are_json_whose_values_the_question_names(kind, seed):
    problem = facts.MAKERS[kind](random.Random(seed), False)
    value = json.loads(problem.answer)
    leaves = list(value.values()) if isinstance(value, dict) else value
    assert names_all(problem.question, [str(leaf) for leaf in leaves if not isinstance(leaf, bool)])


@given(st.integers(0, 999))
def test_numbers_in_words_are_distinct_and_readable(n):
    text = lists.in_words(n)
    assert re.fullmatch(r"[a-z]+( hundred( and [a-z]+(-[a-z]+)?)?)?|[a-z]+-[a-z]+", text)
    assert [m for m in range(1000) if lists.in_words(m) == text] == [n]


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 999), st.integers(0, 999))
def test_both_orders_of_a_pair_are_on_the_same_side_of_the_split(operation, a, b):
    assert pair_held_out(operation, a, b) == pair_held_out(operation, b, a)


def test_about_a_tenth_is_held_out_and_no_single_digit_fact_is():
    assert 0.08 < sum(held_out("x", i) for i in range(5000)) / 5000 < 0.12
    assert not any(
        pair_held_out(operation, a, b)
        for operation in OPERATIONS
        for a in range(10)
        for b in range(10)
    )


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_makers_stay_on_the_side_of_the_split_they_are_asked_for(operation, held):
    rng = random.Random(1)
    for _ in range(300):
        found = [
            int(n) for n in re.findall(r"\d+", arithmetic.MAKERS[operation](rng, held).question)
        ]
        assert len(found) == 2 and pair_held_out(operation, *found) == held


@pytest.mark.parametrize("of", [corpus, mixed_corpus], ids=["plain", "mixed"])
def test_no_held_out_sum_difference_or_product_is_said_anywhere_in_the_corpus(of):
    pattern = re.compile(r"(?<![\d+*/-] )(?<!\d)(\d{1,2}) ?([-+*]) ?(\d{1,2})(?! ?[-+*/]|\d)")
    names = {sign: operation for operation, sign in OPERATIONS.items()}
    checked = 0
    for sample in of(12, 6000):
        text = re.sub(r"\d{4}-\d\d-\d\d", "a date", every_text(sample))
        for a, sign, b in pattern.findall(text):
            checked += 1
            if (sign == "*" and "0" in (a[-1], b[-1])) or (
                sign == "-" and int(a) < 20 and int(b) < 10
            ):
                continue  # steps of longer problems, as the card says
            assert not pair_held_out(names[sign], int(a), int(b)), (
                a,
                sign,
                b,
                text[:500],
            )
    assert checked > 3000


@settings(max_examples=50)
@given(SEEDS)
def test_tool_calls_name_an_offered_tool_and_give_its_required_arguments(seed):
    sample = generate.errand(random.Random(seed))
    offered = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()
    }
    assert offered
    for message in sample.messages:
        for call in message.get("tool_calls", ()):
            parameters = offered[call["function"]["name"]]
            assert (
                set(parameters["required"])
                <= set(call["function"]["arguments"])
                <= set(parameters["properties"])
            )
