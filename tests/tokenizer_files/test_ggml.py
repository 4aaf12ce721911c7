"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.chat_template import TemplateInput
from jaxllm.config import ConfigError
from jaxllm.gguf.architectures.phi3 import ARCHITECTURE
from jaxllm.gguf.directory import TOKENIZER
from jaxllm.gguf.metadata import Metadata
from jaxllm.locate import locate
from jaxllm.tokenizer import Tokenizer
from jaxllm.tokenizer_files.pieces import read_model
from jaxllm.tokenizer_files.splits import SPLITS
from tests.tokenizer_files.test_formats import GOLDENS, IDS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_pair_keys(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer."""
    whole = json.loads(tokenizer.backend.to_str())
    texts = {id: text for text, id in whole["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, NORMAL)
    for token in whole["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    size = max(texts) + 1
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts.get(id, f"[PAD{id}]") for id in range(size)],
        "token_type": [kinds.get(id, 5) for id in range(size)],
        "merges": [" ".join(pair) for pair in whole["model"]["merges"]],
    }


def load(folder: Path, keys: dict[str, Any], **config: Any) -> Tokenizer:
    (folder / TOKENIZER).write_text(json.dumps(keys))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "pre"), [("tekken", "tekken"), ("qwen", "qwen2"), ("kimi", "kimi-k2")]
)
def test_byte_pairs_give_the_ids_of_their_own_library(name: str, pre: str, tmp_path: Path) -> None:
    keys = byte_pair_keys(Tokenizer.load(GOLDENS / name), pre)
    tokenizer = load(tmp_path, keys, bos_token="<s>" if name == "tekken" else None)
    assert {text: tokenizer.encode(text) for text in IDS[name]} == IDS[name]


@pytest.mark.parametrize(("name", "prefix"), [("llama-legacy", True), ("gemma", False)])
def test_pieces_with_scores_give_the_ids_of_sentencepiece(
    name: str, prefix: bool, tmp_path: Path
) -> None:
    model = read_model((GOLDENS / name / "tokenizer.model").read_bytes())
    keys = {
        "model": "llama",
        "tokens": [piece.text for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [int(piece.type) for piece in model.pieces],
        "add_space_prefix": prefix,
    }
    tokenizer = load(tmp_path, keys, bos_token=model.training.bos_piece)
    assert {text: tokenizer.encode(text) for text in IDS[name]} == IDS[name]


def test_text_behind_the_special_tokens_of_phi_3_loses_its_first_spaces(tmp_path: Path) -> None:
    model = read_model((GOLDENS / "llama-legacy" / "tokenizer.model").read_bytes())
    more = ["<|endoftext|>", "<|end|>"]
    keys = {
        "model": "llama",
        "tokens": [*(piece.text for piece in model.pieces), *more],
        "scores": [*(piece.score for piece in model.pieces), -1.0, -1.0],
        "token_type": [*(int(piece.type) for piece in model.pieces), CONTROL, CONTROL],
    }
    whole = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    own = Metadata({"general.architecture": "phi3", **whole})
    tokenizer = load(
        tmp_path, keys, add_bos_token=False, added_tokens_decoder=ARCHITECTURE.added(own)
    )
    plain, size = tokenizer.encode("Hi"), len(model.pieces)
    assert tokenizer.encode("<|end|>\n Hi") == [size + 1, *plain]
    kept = tokenizer.encode("<|endoftext|>\n Hi")
    assert kept[0] == size and len(kept) > len(plain) + 1
    assert ARCHITECTURE.added(Metadata(own.values | {"tokenizer.ggml.model": "gpt2"})) == {}


def test_the_demo_models_tokenizer_chats_alike(tmp_path: Path) -> None:
    demo = Tokenizer.load(locate("demo"))
    keys = byte_pair_keys(demo, "qwen2")
    tokenizer = load(tmp_path, keys, eos_token="<|im_end|>", chat_template=demo.templates)
    chat = TemplateInput(messages=[{"role": "user", "content": "Is <|im_end|> 27 + 58 é?"}])
    assert tokenizer.chat(chat) == demo.chat(chat)
    assert tokenizer.encode("<think>\n</think><|im_end|>") == demo.encode(
        "<think>\n</think><|im_end|>"
    )


def test_a_beginning_and_an_end_are_put_where_the_file_says_so(tmp_path: Path) -> None:
    keys = byte_pair_keys(Tokenizer.load(locate("demo")), "llama-bpe")
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    start, end = 760, 761
    assert load(tmp_path, keys, **roles).encode("")[:1] == [start]
    assert load(tmp_path, keys, **roles, add_bos_token=False).encode("") == []
    assert load(tmp_path, keys, **roles, add_eos_token=True).encode("") == [start, end]


def test_what_llama_cpp_does_for_models_that_it_does_not_know() -> None:
    parts = SPLITS["default"].pre_tokenizer().pre_tokenize_str("I'm 12345 (x)  y")
    assert [part.replace("Ġ", " ") for part, _ in parts] == [
        *("I", "'", "m", " ", "123", "45", " ", "(", "x", ")", " ", " y")
    ]


def test_every_known_way_to_split_is_a_pre_tokenizer() -> None:
    for splits in SPLITS.values():
        parts = splits.pre_tokenizer().pre_tokenize_str("Don't 1234 été!\n\n  x")
        assert "".join(part for part, _ in parts) == "Don't ĠĠ1234".replace(" ĠĠ", "Ġ") + (
            "ĠÃ©tÃ©!ĊĊĠĠx"
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pre": "unheard-of"}, r"'unheard-of' and not known: .*--tokenizer"),
        ({"model": "bert"}, "gpt2 and llama are read"),
        ({"token_type": [1]}, "tokens and 1 types"),
        ({"tokens": [1, 2]}, "no list of str"),
        ({"merges": ["ab"]}, "'ab' is no pair"),
        ({"merges": ["a unheard-of"]}, "no usable tokenizer"),
        ({"model": "llama"}, "not all have scores"),
    ],
)
def test_keys_that_make_no_tokenizer_are_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    keys = byte_pair_keys(Tokenizer.load(locate("demo")), "qwen2")
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, keys | change)
