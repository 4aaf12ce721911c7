"""Clients that people use finish a task with tools against the demo model, whole and streamed."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.clients.environments import Client, need, run
from tests.server.conftest import write_tokenizer
from tests.server.demo_server import Demo
from tests.server.pooling.conftest import EMBEDS, PoolingServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

AI_SDK = ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "@ai-sdk/openai@3.0.141")
CLIENTS = [
    Client("openai_python.py", ("openai==3.54.0",)),
    Client("openai_responses.py", ("openai==3.54.0",)),
    Client("openai_agents.py", ("openai-agents==0.24.0",)),
    Client("anthropic_python.py", ("anthropic==2.12.0",)),
    Client("langchain_chat.py", ("langchain-openai==1.7.3",)),
    Client("inference_client.py", ("huggingface_hub==2.4.0",)),
    Client("pydantic_agent.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("extract_instructor.py", ("instructor==1.17.0",)),
    Client("llama_index_agent.py", ("llama-index-llms-openai-like==0.8.1",)),
    Client("lite.py", ("litellm==1.106.2", "mcp==2.3.0")),
    Client("openai_node.mjs", ("openai@7.57.0",)),
    Client("anthropic_node.mjs", ("@anthropic-ai/sdk@1.12.0",)),
    Client("ai_sdk.mjs", (*AI_SDK, "@ai-sdk/anthropic@3.0.139", "zod@4.6.7")),
]
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no question to another host


EMBEDDINGS = Client("langchain_embeddings.py", ("langchain-openai==1.7.3",))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The demo model's server."""
    demo = Demo("--max-model-len", "1024")
    yield demo.url
    demo.close()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_finishes_its_task(client: Client, url: str, tmp_path: pathlib.Path) -> None:
    if client.script.endswith(".mjs"):
        need("npm", "view", "openai", "version")
    else:
        need(sys.executable, "-m", "pip", "index", "versions", "openai")
    done = run([*client.command(tmp_path / "environment"), url], seconds=300, **ENVIRONMENT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


def test_langchain_embeds_texts_as_the_model_reads_them(tmp_path: pathlib.Path) -> None:
    need(sys.executable, "-m", "pip", "index", "versions", "openai")
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    command = EMBEDDINGS.command(tmp_path / "environment")
    with PoolingServer(tokenizer, EMBEDS) as server:
        done = run([*command, server.url], seconds=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
