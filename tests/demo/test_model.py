"""The packaged weights answer as transformers does and as the card claims; a tiny training run
learns."""

from __future__ import annotations

import json
import pathlib
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

import jaxllm.demo
from examples.demo_model import arithmetic, card, evaluate, train
from examples.demo_model.decode import greedy
from examples.demo_model.evaluate import Prompts, addition_pairs, read
from examples.demo_model.network import CONFIG, TINY, create, load, tensors
from examples.demo_model.pack import Rows, pack
from examples.demo_model.skills.cases import read as read_answer
from jaxllm import LLM, SamplingParams
from jaxllm.nn.contexts.dense import DenseContext
from tests.demo.conversations import AGENTS

DEMO = pathlib.Path(jaxllm.demo.path())
GOLDENS = json.loads(pathlib.Path(__file__).with_name("goldens.json").read_text())
STOP = (761, 759)
ROW = 768  # tokens of one forward pass
SHORT_GOLDENS = (
    "sum",
    "system",
    "sort",
    "reverse",
    "12 + 34 =",
    "99+1=",
    "The capital of France is",
)


@pytest.fixture(scope="module")
def model():
    return load(DEMO)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@nnx.jit
def chosen(model, token_T, position_T, segment_T):
    """The greedy next token after every token of one packed row, by the engine's dense
    attention."""
    context = DenseContext(segment_T)
    return model.logits(model(token_T, position_T, context), context).argmax(-1)


def choices(model, documents: list[list[int]]) -> list[list[int]]:
    """The greedy next token after every token of each document."""
    found: list[list[int]] = []
    while len(found) < len(documents):
        ends = np.cumsum([len(document) for document in documents[len(found) :]])
        row = documents[len(found) :][: int((ends <= ROW).sum())]
        token_T, position_T, segment_T = np.zeros((3, ROW), np.int32)
        for segment, (document, end) in enumerate(zip(row, ends, strict=False), 1):
            span = slice(end - len(document), end)
            token_T[span], position_T[span], segment_T[span] = (
                document,
                range(len(document)),
                segment,
            )
        parts = np.split(
            np.asarray(chosen(model, token_T, position_T, segment_T)), ends[: len(row)]
        )
        found += [part.tolist() for part in parts[:-1]]
    return found


def says(model, pairs: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Whether greedy decoding of each prompt gives exactly this answer: each of its tokens is the
    choice after those before it."""
    followed = choices(model, [prompt + answer for prompt, answer in pairs])
    return [
        found[len(prompt) - 1 : -1] == answer
        for found, (prompt, answer) in zip(followed, pairs, strict=True)
    ]


def test_every_golden_answer_of_transformers_is_the_models_greedy_answer(model):
    right = says(
        model, [(golden["prompt_ids"], golden["answer_ids"]) for golden in GOLDENS.values()]
    )
    assert [name for name, equal in zip(GOLDENS, right, strict=True) if not equal] == []


def test_decoding_with_the_cache_gives_the_golden_tokens(model):
    goldens = [GOLDENS[name] for name in SHORT_GOLDENS]
    assert greedy(model, [g["prompt_ids"] for g in goldens], [16] * len(goldens), STOP) == [
        g["answer_ids"] for g in goldens
    ]


@pytest.mark.slow
def test_attention_for_training_on_a_gpu_gives_the_dense_ones_losses(monkeypatch):
    attention = jax.nn.dot_product_attention

    def portable(*args, **options):
        assert [x.dtype for x in args] == [jnp.bfloat16] * 3  # all that cuDNN takes
        return attention(*args, **options | {"implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", portable)
    graph, state = nnx.split(create(TINY))
    token_BT = np.random.default_rng(0).integers(0, TINY["vocab_size"], (2, 24), np.int32)
    segment_BT = np.repeat([[0, 0, 1], [0, 1, 1]], 8, axis=1).astype(np.int32)
    position_BT = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    rows = Rows(token_BT, segment_BT, position_BT, np.ones_like(token_BT))
    dense = train.loss_of(graph, state, rows)
    monkeypatch.setattr(train, "can_fuse", lambda dtype: True)
    fused, gradient = jax.value_and_grad(train.loss_of, argnums=1)(graph, state, rows)
    assert abs(float(fused - dense)) < 1e-2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_goldens_answer_rightly():
    answers = {name: golden["answer"] for name, golden in GOLDENS.items()}
    assert (
        answers["sum"] == "85<|im_end|>"
        and answers["system"] == "174<|im_end|>"
        and answers["12 + 34 ="] == " 46<|endoftext|>"
    )
    assert answers["sort"] == "7, 13, 42, 99<|im_end|>" and answers["reverse"] == "ananab<|im_end|>"
    assert json.loads(answers["json"].removesuffix("<|im_end|>")) == {"name": "Maria", "age": 34}
    assert answers["thinking"].startswith("<think>\n") and read(
        answers["thinking"].removesuffix("<|im_end|>"), ""
    ) == str(47 * 83)
    calculator = {"name": "calculator", "arguments": {"expression": "47 * 83"}}
    assert read(answers["tool"], []) == [calculator] and read(answers["tool, thinking"], []) == [
        calculator
    ]
    assert [call["arguments"]["city"] for call in read(answers["two tools"], [])] == [
        "Paris",
        "Rome",
    ]
    assert answers["tool answered"] == "3901<|im_end|>"


TABLE = {"city": "Rome", "people": 4, "time": "19:30"}
AGENT_CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one call": [("book_table", TABLE)],
    "parallel calls": [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Bern"})],
    "parallel calls of two tools": [("book_table", TABLE), ("get_weather", {"city": "Rome"})],
    "first of two calls": [("read_file", {"path": "notes/river.txt"})],
    "second of two calls": [("run_command", {"command": "wc -l photos/star.csv"})],
}
AGENT_ANSWERS = {
    "failed call": "The tool failed: not found.",
    "parallel results": "In Oslo it is 3 degrees and snowy. In Bern it is 9 degrees and cloudy.",
    "no tool fits": "I have no tool for that.",
    "missing argument": "Please tell me the city.",
}


@pytest.mark.parametrize("tool_format", ["json", "xml"])
def test_goldens_with_tools_call_rightly_and_answer_from_results(tool_format):
    for name, chat in AGENTS.items():
        golden = GOLDENS[name if tool_format == "json" else f"{name}, in XML"]
        text = golden["answer"].removesuffix("<|im_end|>")
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in chat["tools"]}
        answer = read_answer(text, golden["prompt"], tool_format, schemas)
        assert answer.calls == AGENT_CALLS.get(name, []), name
        assert answer.content == AGENT_ANSWERS.get(name, ""), name


def test_the_golden_to_a_schema_follows_it():
    said = GOLDENS["json to a schema"]["answer"].removesuffix("<|im_end|>")
    assert json.loads(said) == {"name": "Maria", "age": 34, "city": "Lyon"}


def test_two_digit_addition_is_right_on_at_least_95_percent_of_held_out_pairs(model, tokenizer):
    rng, prompts = random.Random(77), Prompts()
    pairs = rng.sample(addition_pairs(), 60)
    asked = [prompts.ask(arithmetic.problem(rng, "add", a, b).question) for a, b in pairs]
    wanted = [tokenizer.encode(f"{a + b}<|im_end|>").ids for a, b in pairs]
    right = says(
        model,
        [
            (tokenizer.encode(prompt).ids, answer)
            for prompt, answer in zip(asked, wanted, strict=True)
        ],
    )
    assert sum(right) >= 0.95 * len(pairs)
    wrong = [tokenizer.encode(f"{a + b + 1}<|im_end|>").ids for a, b in pairs]
    assert sum(
        says(
            model,
            [
                (tokenizer.encode(prompt).ids, answer)
                for prompt, answer in zip(asked, wrong, strict=True)
            ],
        )
    ) <= 0.05 * len(pairs)


def test_the_card_says_what_the_evaluator_measured():
    assert (DEMO / "README.md").read_text() == card.current(DEMO)
    tasks = json.loads((card.HERE / "metrics.json").read_text())["tasks"]
    assert tasks["two-digit addition"]["total"] == len(addition_pairs())
    assert tasks["two-digit addition"]["correct"] >= 0.95 * tasks["two-digit addition"]["total"]


def test_the_card_tells_of_every_run_and_of_skills_if_they_are_measured():
    read_record = lambda name: json.loads((card.HERE / name).read_text())
    config = json.loads((DEMO / "config.json").read_text())
    metrics, runs = read_record("metrics.json"), [read_record(name) for name in card.RUNS]
    metrics["skills"] = {"calls in XML: one call": {"correct": 3, "total": 4}}
    runs[1]["recipe"] |= {"steps": 7, "lengths": [512, 1024]}
    text = card.card(config, metrics, runs, 9_000_000)
    assert "| calls in XML: one call | 3 | 4 | 75.0 |" in text
    assert "rows of 512, 1024" in text and "7,100 steps" in text and "7 steps" in text
    del metrics["skills"]
    plain = card.card(config, metrics, runs[1:], 9_000_000)
    assert "7,100" not in plain and "tool_format" in text and "tool_format" not in plain


def test_the_package_is_small_and_complete():
    names = {path.name for path in DEMO.iterdir() if path.is_file()}
    hub = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
    }
    assert hub <= names
    assert sum((DEMO / name).stat().st_size for name in names) <= 10_000_000


def test_the_packaged_configuration_is_the_trained_one(tokenizer):
    assert json.loads((DEMO / "config.json").read_text()) == CONFIG
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert [tokenizer.id_to_token(token) for token in generation["eos_token_id"]] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert (
        tuple(generation["eos_token_id"]) == STOP
        and tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    )


def test_heads_width_and_vocabulary_divide_over_eight_devices():
    assert all(
        CONFIG[key] % 8 == 0
        for key in ("num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    )


def tiny_recipe(**changes):
    """A recipe of seconds."""
    sizes = {"steps": 12, "tokens": 512, "lengths": (128,), "documents": 200, "workers": 1}
    return train.Recipe(**(sizes | {"warmup": 2, "rate": 1e-2} | changes))


@pytest.fixture(scope="module")
def rows():
    return pack(DEMO / "tokenizer.json", 200, (128,), seed=1)


@pytest.mark.slow
def test_a_tiny_training_run_learns_and_its_weights_survive_the_disk(rows, tmp_path):
    trained, losses = train.train(TINY, tiny_recipe(), lambda: rows, report=lambda line: None)
    assert abs(losses[0] - np.log(TINY["vocab_size"])) < 0.2
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    train.export(tmp_path, TINY, trained)
    read_back = tensors(load(tmp_path), TINY)
    assert read_back.keys() == tensors(trained, TINY).keys()
    for name, value in tensors(trained, TINY).items():
        np.testing.assert_array_equal(read_back[name], value, err_msg=name)


@pytest.mark.slow
def test_time_ends_a_run_that_goes_on_from_given_weights(rows, tmp_path, monkeypatch):
    given = create(TINY, seed=9)
    train.export(tmp_path, TINY, given)
    step = lambda state, moments, rate, columns: (state, moments, jnp.float32(rate))
    monkeypatch.setattr(train, "compile_steps", lambda *how: {128: step})
    recipe = tiny_recipe(start=str(tmp_path), seconds=1e-6)
    trained, rates = train.train(TINY, recipe, lambda: rows, report=lambda line: None)
    assert len(rates) == 1 and rates[0] < recipe.rate
    for name, value in tensors(trained, TINY).items():
        np.testing.assert_array_equal(value, tensors(given, TINY)[name], err_msg=name)


def test_the_learning_rate_ends_at_its_floor_by_steps_or_by_seconds():
    recipe = train.Recipe(steps=1000, seconds=100.0, rate=1.0, warmup=10, floor=0.1)
    assert recipe.rate_at(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate_at(500, 0.0) == recipe.rate_at(100, 50.0) == pytest.approx(0.55)
    assert recipe.rate_at(1000, 0.0) == recipe.rate_at(100, 120.0) == pytest.approx(0.1)


def test_a_pass_takes_every_row_at_most_once_and_steps_have_rows_of_one_length():
    numbered = lambda length, count: Rows(
        *(np.arange(count * length).reshape(count, length) for _ in range(4))
    )
    recipe = tiny_recipe(steps=14, tokens=32, lengths=(8, 16))
    taken = [step[0] for step in train.batches([numbered(8, 18), numbered(16, 7)], recipe)]
    assert len(taken) == recipe.steps
    for length, steps, rows in ((8, 4, 4), (16, 3, 2)):
        of_a_pass = [step for step in taken[:7] if step.shape[1] == length]
        assert [step.shape for step in of_a_pass] == [(rows, length)] * steps
        assert len(np.unique(np.concatenate(of_a_pass))) == steps * rows * length
    (few,) = train.batches([numbered(8, 3)], tiny_recipe(steps=1, tokens=32, lengths=(8,)))
    assert few[0].shape == (4, 8)


@pytest.mark.slow
def test_a_tiny_model_is_trained_judged_and_described_by_the_commands(tmp_path, monkeypatch):
    def command(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()

    folder, metrics = tmp_path / "model", tmp_path / "metrics.json"
    command(train, "--tiny", "--seconds", 600, "--out", folder)
    command(evaluate, "--model", folder, "--count", 1, "--skills", 2, "--out", metrics)
    found, training = (
        json.loads(metrics.read_text()),
        json.loads((folder / "training.json").read_text()),
    )
    assert training["recipe"]["steps"] == 30 and training["last_loss"] < training["first_loss"] - 1
    assert any(task.startswith("calls in XML") for task in found["skills"])
    assert "Tools and schemas" in card.card(TINY, found, [training], 100_000)
    llm = LLM(str(folder), max_model_len=256, max_num_seqs=1)
    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
    assert len(answer.outputs[0].token_ids) <= 4
