"""A small tokenizer with a chat template, and servers over the fake engine."""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.tokenizer import Tokenizer, byte_alphabet
from tests.server.harness import Running
from tests.server.processes import Process

TEMPLATE = """{%- for message in messages -%}
{%- if message['content'] == 'raise' -%}{{ raise_exception('the template says no') }}{%- endif -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}{%- for call in message['tool_calls'] or [] -%}
[{{ call.function.name }} {{ call.function.arguments | tojson }}]
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}no thinking
{% endif %}{%- endif -%}"""


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """Processes that the test starts do not inherit that SIGHUP is ignored, as it is where nohup
    runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def write_tokenizer(directory: pathlib.Path) -> pathlib.Path:
    """One token per byte, and three special tokens (ids 256 to 258)."""
    vocabulary = dict(byte_alphabet())
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "fake"}))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a tokenizer and a config, without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: pathlib.Path) -> Tokenizer:
    """One token per byte."""
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server without a key, shared by a module's tests."""
    with Running(tokenizer) as running:
        yield running


@pytest.fixture
def fresh(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that a test may break."""
    with Running(tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """openai-python against the shared server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def launch(model_dir: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Starts processes and ends them."""
    started: list[Process] = []

    def start(*flags: str, **options: Any) -> Process:
        started.append(Process(model_dir, tmp_path, *flags, **options))
        return started[-1]

    yield start
    for process in started:
        process.close()
