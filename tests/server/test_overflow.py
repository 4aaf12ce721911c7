"""A prompt that is too long is refused in words that clients know, in every API, however it was
counted; the number in them is never more than the prompt's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from jaxllm.engine.intake.validation import check_prompt
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.anthropic.errors import envelope
from jaxllm.server.errors import ApiError
from jaxllm.server.requests import large_bodies, limits
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import RESOLVED
from tests.server.harness import Answer, Running
from tests.server.pooling.conftest import EMBEDS, SCORES, PoolingServer

CONTEXT = 256
# By which OpenAI's clients, LiteLLM, LangChain and opencode know an overflow; Claude Code the other
WORDS = re.compile(
    rf"this model's maximum context length is {CONTEXT} tokens, but the prompt has "
    r"(?:at least )?(\d+) tokens.*; the prompt is too long: .*shorten it"
)
ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
FEW, MANY = 300, 5000  # characters of one token each: counted as tokens, and before that
TRUNCATED = {"truncate_prompt_tokens": 100}


def user(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# path -> the body of a text
TEXTS: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/completions/render": lambda text: {"prompt": text},
    "/v1/chat/completions": user,
    "/v1/chat/completions/render": user,
    "/v1/responses": lambda text: {"input": text, "instructions": "Be brief."},
    "/generate": lambda text: {"text": text},
}
POOLED: dict[str, Any] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/embeddings of a chat": user,
    "/v2/embed": lambda text: {"texts": [text], "truncate": "NONE"},
    "/pooling": lambda text: {"input": ["a", text]},
    "/score": lambda text: {"text_1": "a", "text_2": text},
    "/rerank": lambda text: {"query": text, "documents": ["a"]},
}


@pytest.fixture(scope="module")
def embedder(tokenizer: Tokenizer) -> Iterator[Running]:
    with PoolingServer(tokenizer, EMBEDS) as running:
        yield running


@pytest.fixture(scope="module")
def scorer(tokenizer: Tokenizer) -> Iterator[Running]:
    with PoolingServer(tokenizer, SCORES) as running:
        yield running


def check_overflow(answer: Answer, characters: int) -> int:
    """The tokens that OpenAI's envelope names."""
    assert answer.status == 400, answer.body
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    found = WORDS.match(error["message"])
    assert found is not None, error["message"]
    exact = "has at least" not in error["message"]
    tokens = int(found[1])
    assert tokens >= CONTEXT
    assert (tokens >= characters) if exact else (tokens <= characters)
    return tokens


@pytest.mark.parametrize("characters", [FEW, MANY])
@pytest.mark.parametrize("path", TEXTS)
def test_a_text_that_is_too_long_is_refused_in_words_that_clients_know(
    server: Running, path: str, characters: int
) -> None:
    body = {"model": "fake"} | TEXTS[path]("a" * characters)
    for stream in (False, True):
        tokens = check_overflow(server.post(path, body | {"stream": stream}), characters)
        assert (tokens >= characters) is (characters == FEW)


@pytest.mark.parametrize("characters", [FEW, MANY])
@pytest.mark.parametrize("path", POOLED)
def test_so_is_an_input_to_be_pooled(
    embedder: Running, scorer: Running, path: str, characters: int
) -> None:
    body = {"model": "fake"} | POOLED[path]("a" * characters)
    server = scorer if path in ("/score", "/rerank") else embedder
    check_overflow(server.post(path.split()[0], body), characters)


def test_a_query_that_is_not_cut_has_to_be_shortened(scorer: Running) -> None:
    body = {"model": "fake", "query": "a" * FEW, "documents": ["b"]}
    for options, remedy in (
        ({}, "shorten it or send truncate_prompt_tokens"),
        (TRUNCATED, "shorten it"),
    ):
        message = scorer.post("/rerank", body | options).error["message"]
        assert message.endswith(f"the prompt is too long: {remedy}")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", [97] * FEW),
        ("/v1/completions", "prompt", [[97], [97] * FEW]),
        ("/v1/completions", "prompt", [97] * 400_000),
        ("/v1/completions", "prompt", [[97], [97] * 400_000]),
        ("/generate", "input_ids", [97] * FEW),
        ("/detokenize", "tokens", [97] * FEW),
    ],
)
def test_so_are_token_ids_whose_number_is_exact(
    server: Running, path: str, field: str, value: Any
) -> None:
    ids = value[-1] if isinstance(value[-1], list) else value
    tokens = check_overflow(server.post(path, {"model": "fake", field: value}), len(ids))
    assert tokens == len(ids)


def test_ids_whose_text_is_asked_for_may_fill_the_context(server: Running) -> None:
    assert server.post("/detokenize", {"tokens": [97] * CONTEXT}).json() == {"prompt": "a" * 256}
    for tokens in (CONTEXT + 1, 400_000):
        message = server.post("/detokenize", {"tokens": [97] * tokens}).error["message"]
        assert f"the prompt has {tokens} tokens; the prompt is too long" in message


def test_so_is_a_text_of_megabytes_which_is_not_even_decoded(
    server: Running, tokenizer: Tokenizer
) -> None:
    for text in ("a" * 2_000_000, "é" * 1_000_000, "a\n" * 1_000_000):
        body = json.dumps({"model": "fake", "prompt": text}, ensure_ascii=False).encode()
        answer = server.post("/v1/completions", body)
        check_overflow(answer, len(text))
        least, written = -(-len(text) // tokenizer.longest_token), f"{len(text)} characters"
        known = written if "\n" not in text else f"at least {written}"
        assert f"has at least {least} tokens ({known})" in answer.error["message"]
    check_overflow(server.post("/tokenize", {"prompt": "a" * 2_000_000}), 2_000_000)


@pytest.mark.parametrize("as_ids", [False, True])
def test_so_is_a_prompt_that_is_too_long_to_be_truncated(
    server: Running, monkeypatch: pytest.MonkeyPatch, as_ids: bool
) -> None:
    monkeypatch.setattr(limits, "TRUNCATED_CHARS", 20_000)
    monkeypatch.setattr(large_bodies, "MAX_TRUNCATED_IDS", 400_000)
    prompt: Any = [97] * 400_001 if as_ids else "a" * 30_000
    body = {"model": "fake", "prompt": prompt} | TRUNCATED
    answer = server.post("/v1/completions", body)
    check_overflow(answer, len(prompt))
    assert "to be truncated" in answer.error["message"]


def test_so_is_a_chat_whose_template_or_documents_are_long(server: Running) -> None:
    turns = [{"role": "assistant", "content": "a" * 1000}, {"role": "user", "content": "b"}] * 9
    # No answer's text is counted before the template has shown it
    check_overflow(server.post("/v1/chat/completions", {"model": "fake", "messages": turns}), 9500)


@pytest.mark.parametrize("characters", [FEW, MANY, 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_messages_are_refused_in_anthropics_words(
    server: Running, characters: int, stream: bool
) -> None:
    body = {"model": "fake", "max_tokens": 5, "stream": stream} | user("a" * characters)
    answer = server.post("/v1/messages", body)
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    found = ANTHROPIC.fullmatch(error["message"])
    assert found is not None, error["message"]
    tokens, most = map(int, found.groups())
    assert tokens > most == CONTEXT
    assert (tokens > characters) is (characters == FEW)


def test_a_message_as_long_as_the_context_is_longer_than_a_prompt_may_be(server: Running) -> None:
    counted = server.post("/v1/messages/count_tokens", {"model": "fake"} | user("")).json()
    text = "a" * (CONTEXT - counted["input_tokens"])
    body = {"model": "fake", "max_tokens": 5} | user(text)
    message = server.post("/v1/messages", body).json()["error"]["message"]
    assert message == f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum"
    assert server.post("/v1/messages", body | user(text[1:])).status == 200


def test_what_the_engine_alone_refuses_is_said_in_the_same_words() -> None:
    reason = "this model's maximum context length is 9 tokens, but the prompt has 10 tokens"
    error = ApiError(400, reason, code="context_length_exceeded")
    assert envelope(error, None)["error"]["message"] == f"prompt is too long: {reason}"


@pytest.mark.parametrize("characters", [10, FEW, MANY, 100_000])
def test_tokens_of_messages_and_responses_are_counted_beyond_the_context(
    server: Running, characters: int
) -> None:
    text = "a" * characters
    counted = server.post("/v1/messages/count_tokens", {"model": "fake"} | user(text)).json()
    shell = server.post("/v1/messages/count_tokens", {"model": "fake"} | user("")).json()
    assert counted == {"input_tokens": shell["input_tokens"] + characters}
    reply = server.post("/v1/responses/input_tokens", {"model": "fake", "input": text})
    assert reply.json() == {"object": "response.input_tokens", **counted}
    assert server.post("/v1/responses/input_tokens", {"input": text}).json() == reply.json()


def test_white_space_that_a_template_takes_off_is_not_counted_before(model_dir: Any) -> None:
    template = "{% for one in messages %}{{ one.content | trim }}{% endfor %}"
    tokenizer = Tokenizer.load(model_dir, template)
    body = {"model": "fake", "messages": [{"role": "user", "content": " " * MANY + "hi"}]}
    body["messages"].append({"role": "assistant", "content": "a", "reasoning": "b" * MANY})
    with Running(tokenizer) as running:
        answer = running.post("/v1/chat/completions", body)
    assert answer.json()["usage"]["prompt_tokens"] == len("hia")


def test_a_request_error_of_the_engine_names_the_context() -> None:
    request = GenerateRequest(id="a", prompt=Prompt([97] * CONTEXT), params=SamplingParams())
    with pytest.raises(RequestError, match="maximum context length is 256 tokens, but the prompt"):
        check_prompt(request, RESOLVED, CONTEXT - 1)


def test_a_tokenizer_that_drops_characters_counts_before_it_refuses(tmp_path: Any) -> None:
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}
    backend = Backend(models.WordPiece(words, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with PoolingServer(Tokenizer.load(tmp_path), EMBEDS) as running:
        for text in (" " * 100_000 + "a", "x" * 100_000):  # one word
            reply = running.post("/v1/embeddings", {"model": "fake", "input": text})
            assert reply.json()["usage"]["prompt_tokens"] == 1
        answer = running.post("/v1/embeddings", {"model": "fake", "input": "a " * 50_000})
        assert check_overflow(answer, 50_000) == 50_000


@pytest.mark.parametrize("name", ["qwen", "llama", "gemma", "tekken", "xlm-roberta"])
def test_no_text_has_fewer_tokens_than_its_characters_say(name: str, repo: Any) -> None:
    tokenizer = Tokenizer.load(repo / "tests" / "goldens" / "tokenizers" / name)
    assert tokenizer.may_drop is (name == "xlm-roberta")
    if tokenizer.may_drop:
        return
    for piece in (
        "a",
        " ",
        "\n",
        "the ",
        "0123",
        "日本",
        "e\u0301",
        "\U0001f600",
        "\x01",
        "ש",
        "=" * 8,
    ):
        text = piece * 500
        least = -(-len(text) // tokenizer.longest_token)
        assert len(tokenizer.encode(text, add_special_tokens=False)) >= least, (name, piece)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 5000}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5000}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 9000}),
        ("/v1/responses", {"input": "a", "instructions": "a" * 2_000_000}),
    ],
)
def test_so_is_a_conversation_of_too_many_parts_or_with_long_instructions(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, {"model": "fake"} | body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "the prompt is too long: shorten it" in answer.error["message"]


def test_so_are_messages_of_too_many_parts_in_anthropics_words(server: Running) -> None:
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 2500
    body = {"model": "fake", "max_tokens": 5, "messages": [*messages, messages[0]]}
    error = server.post("/v1/messages", body).json()["error"]
    assert error["message"].startswith("prompt is too long: this model's maximum context length")
    system = {"system": "a" * 2_000_000, "messages": messages[:1]}
    error = server.post("/v1/messages", body | system).json()["error"]
    assert ANTHROPIC.fullmatch(error["message"])
