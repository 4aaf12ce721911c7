"""`suffix`: prompts with a text before and a text after what is asked for."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from jaxllm.server.requests.infill import FORMATS, find_infill
from jaxllm.tokenizer import Tokenizer
from tests.server.conftest import write_tokenizer
from tests.server.harness import Running

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"]


def with_tokens(directory: pathlib.Path, added: list[str]) -> Tokenizer:
    """One token per byte, and more special tokens."""
    write_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(added)
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose tokenizer has the markers of Qwen2.5-Coder."""
    with Running(with_tokens(tmp_path_factory.mktemp("qwen"), QWEN)) as running:
        yield running


def prompt_of(running: Running, body: dict[str, object]) -> str:
    """The prompt that the engine got."""
    assert running.post("/v1/completions", {"model": "fake", **body}).status == 200
    ids = running.control.added[-1].prompt.tokens
    return running.server_state.decode_prompt(ids)


def test_the_suffix_stands_between_the_markers(qwen: Running) -> None:
    body = {"prompt": "def f(", "suffix": "\n    return x", "max_tokens": 1}
    found = prompt_of(qwen, body)
    assert found == "<|fim_prefix|>def f(<|fim_suffix|>\n    return x<|fim_middle|>"


def test_an_empty_prompt_is_the_beginning_of_a_file(qwen: Running) -> None:
    found = prompt_of(qwen, {"prompt": "", "suffix": "end", "max_tokens": 1})
    assert found == "<|fim_prefix|><|fim_suffix|>end<|fim_middle|>"


def test_tokens_that_begin_another_file_end_the_middle(qwen: Running) -> None:
    body = {"prompt": "a", "suffix": "b", "stop_token_ids": [7], "max_tokens": 1}
    prompt_of(qwen, body)
    backend = qwen.server_state.tokenizer.backend  # type: ignore[union-attr]
    ends = [backend.token_to_id(name) for name in ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>")]
    assert set(qwen.control.added[-1].params.stop_token_ids or ()) == {7, *ends}


def test_every_prompt_of_a_list_gets_the_suffix(qwen: Running) -> None:
    body = {"model": "fake", "prompt": ["a", "bc"], "suffix": "z", "max_tokens": 1}
    rendered = qwen.post("/v1/completions/render", body).json()
    texts = [qwen.server_state.decode_prompt(one["token_ids"]) for one in rendered]
    assert texts == [
        "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>",
        "<|fim_prefix|>bc<|fim_suffix|>z<|fim_middle|>",
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt": [1, 2]}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x" * 100_000}, "suffix"),
    ],
)
def test_what_a_suffix_cannot_go_with_is_a_400(
    qwen: Running, more: dict[str, object], param: str
) -> None:
    answer = qwen.post("/v1/completions", {"model": "fake", "prompt": "a", "suffix": "b", **more})
    assert answer.status == 400 and answer.error["param"] == param


def test_a_model_without_markers_says_so(server: Running) -> None:
    body = {"model": "fake", "prompt": "a", "suffix": "b"}
    answer = server.post("/v1/completions", body)
    assert answer.status == 400 and answer.error["param"] == "suffix"
    assert "tokenizer has none" in answer.error["message"]
    assert server.post("/v1/completions", body | {"suffix": ""}).status == 200


@pytest.mark.parametrize("number", range(len(FORMATS)))
def test_every_format_is_found_by_its_markers(number: int, tmp_path: pathlib.Path) -> None:
    markers, ends = FORMATS[number]
    new = [name for name in [*markers, *ends] if name != "<|endoftext|>"]
    tokenizer = with_tokens(tmp_path, new)
    found = find_infill(tokenizer)
    assert found is not None
    named = [tokenizer.backend.id_to_token(id) for id in (*found.markers, *found.ends)]
    assert named == [*markers, *ends]


def test_a_sentencepiece_suffix_gets_no_space_of_its_own() -> None:
    letters = {letter: id for id, letter in enumerate(["<s>", "<unk>", "▁", *"abc\u263a"])}
    backend = Backend(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens(["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    found = find_infill(tokenizer)
    assert found is not None
    ids = found.prompt(tokenizer, "a", "b c")
    names = [backend.id_to_token(id) for id in ids]
    assert names == ["<s>", "▁<PRE>", "▁", "a", "▁<SUF>", "b", "▁", "c", "▁<MID>"]
    assert json.dumps(found.ends) == json.dumps([backend.token_to_id("▁<EOT>")])
