"""Tokenizers in formats without tokenizer.json: ids as their own libraries give them."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import unicodedata

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxllm.chat_template import TemplateInput
from jaxllm.config import ConfigError
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.matcher import Matchers
from jaxllm.grammar.structure import StructuredOutputsParams
from jaxllm.tokenizer import Tokenizer
from jaxllm.tokenizer_files.sentencepiece import SPACE

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens" / "tokenizers"
IDS: dict[str, dict[str, list[int]]] = json.loads((GOLDENS / "ids.json").read_text())
LOSSLESS = ["chatglm", "gemma", "glm4", "hunyuan", "kimi", "llama-legacy", "qwen", "tekken"]
COMPOSING = ("hunyuan", "qwen")  # they compose characters first


@functools.cache
def load(name: str) -> Tokenizer:
    """A tokenizer of the goldens."""
    return Tokenizer.load(GOLDENS / name)


@pytest.mark.parametrize("name", sorted(IDS))
def test_ids_are_those_of_the_formats_own_library(name: str) -> None:
    tokenizer = load(name)
    assert {text: tokenizer.encode(text) for text in IDS[name]} == IDS[name]


@pytest.mark.parametrize("name", LOSSLESS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_text_survives_the_round_trip(name: str, text: str) -> None:
    tokenizer = load(name)
    special = tokenizer.backend.get_added_tokens_decoder().values()
    assume(not any(token.content in text for token in special))  # decoding leaves these out
    meant = unicodedata.normalize("NFC", text) if name in COMPOSING else text
    assert tokenizer.decode(tokenizer.encode(text)) == meant


@pytest.mark.parametrize("name", LOSSLESS)
def test_bytes_of_tokens_join_to_the_text(name: str) -> None:
    tokenizer = load(name)
    text = "x é你😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text


def test_grammars_are_followed_in_every_format() -> None:
    text, checker = "the rights  of 世界é x", Checker({})
    grammar = checker.compile_params(StructuredOutputsParams(choice=[text]))
    checker.end_processes()
    for name in LOSSLESS:
        backend = load(name).backend
        width = max(backend.get_vocab().values()) + 1
        matchers, said = Matchers(backend, width, [width - 1]), []
        matcher = matchers.start_matcher(grammar).result(60)
        while not matcher.ended:
            bits = np.full(matcher.mask_words, 2**32 - 1, np.uint32)
            matcher.apply_mask(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            said.append(int(allowed[0]))
            matcher.accept_tokens(said[-1:])
        matchers.end_threads()
        assert load(name).decode([id for id in said if id != width - 1]) == text, name


def test_a_special_token_takes_the_id_of_the_piece_that_it_renames() -> None:
    tokenizer = load("internlm2")
    (id,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert tokenizer.backend.id_to_token(id) == "<|im_start|>"
    assert tokenizer.backend.token_to_id("[UNUSED_TOKEN_1]") is None
    assert tokenizer.decode([id]) == "" and tokenizer.decode([id], False) == "<|im_start|>"


def test_ids_without_a_name_are_reserved_tokens() -> None:
    tokenizer = load("kimi")
    base = tokenizer.hf.bos_token_id
    assert tokenizer.encode(f"<|reserved_token_{base + 1}|>") == [base + 1]
    assert tokenizer.encode("<|im_end|>") == [base + 2]
    assert len(tokenizer.hf) == base + 256


def test_a_word_that_is_part_of_a_prefix_stays_text_within_words() -> None:
    tokenizer = load("chatglm")
    sop = tokenizer.backend.token_to_id("sop")
    assert sop not in tokenizer.encode("philosophy", add_special_tokens=False)
    assert sop in tokenizer.encode("[gMASK]sop<|user|>", add_special_tokens=False)


def test_settings_say_what_stands_around_a_text(tmp_path: pathlib.Path) -> None:
    shutil.copy(GOLDENS / "llama" / "tokenizer.model", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    plain = load("llama").encode("a b", add_special_tokens=False)
    for settings_, ids in (
        ({}, [1, *plain]),
        ({"add_bos_token": False}, plain),
        ({"add_bos_token": None, "add_eos_token": True}, [1, *plain, 2]),
    ):
        path.write_text(json.dumps(settings_ | {"bos_token": {"content": "<s>"}}))
        assert Tokenizer.load(tmp_path).encode("a b") == ids


def test_older_files_of_added_tokens_are_read(tmp_path: pathlib.Path) -> None:
    shutil.copy(GOLDENS / "llama" / "tokenizer.model", tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<mine>": 561, "<end>": 560}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>"}))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a<mine><end>", add_special_tokens=False)
    assert ids[-2:] == [561, 560] and tokenizer.hf.eos_token_id == 560
    assert tokenizer.decode(ids) == "a<mine>"


def test_chats_are_rendered_with_the_directorys_template(tmp_path: pathlib.Path) -> None:
    shutil.copy(GOLDENS / "tekken" / "tekken.json", tmp_path)
    template = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.chat(TemplateInput(messages=[{"role": "user", "content": "[/INST] x"}]))
    assert ids[:2] == [1, 3] and ids[-1] == 4 and ids.count(4) == 1


def test_code_of_a_repository_is_not_needed_where_tokenizer_json_is(tmp_path: pathlib.Path) -> None:
    load("llama").backend.save(str(tmp_path / "tokenizer.json"))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')\n")
    assert Tokenizer.load(tmp_path).encode("a b") == load("llama").encode("a b")


def test_two_texts_of_xlm_roberta_have_two_ends_between_them() -> None:
    tokenizer = load("xlm-roberta")
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    ids, _ = tokenizer.encode_pair("a", "b")
    assert ids == [0, *one, 2, 2, *two, 2]
    assert tokenizer.encode("<pad><mask>")[1:-1] == [1, max(tokenizer.backend.get_vocab().values())]


def test_fairseqs_numbers_need_its_first_pieces_and_a_class_that_has_them(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(
        (GOLDENS / "llama" / "tokenizer.model").read_bytes().replace(b"<unk>", b"<huh>", 1)
    )
    with pytest.raises(ConfigError, match="its first pieces are"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CamembertTokenizer"}')
    with pytest.raises(ConfigError, match="known classes with fairseq files: XLMRobertaTok"):
        Tokenizer.load(tmp_path)
