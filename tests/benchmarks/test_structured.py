"""The tokenizer and the schema of the benchmark of structured output."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.structured import SCHEMA, write_tokenizer
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams


def test_the_tokenizer_has_as_many_tokens_as_wanted_and_says_every_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 3000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = json.dumps({"name": "ünï 😀", "id": 123}, ensure_ascii=False)
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == 3000
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


def test_the_schema_compiles() -> None:
    checker = Checker({})
    try:
        assert checker.compile_params(StructuredOutputsParams(json=SCHEMA))
    finally:
        checker.end_processes()
