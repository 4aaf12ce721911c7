"""docs/clients.md knows every client and agent that is tested; its settings parse."""

from __future__ import annotations

import json
import tomllib

from tests.clients.agents import AGENTS, PAGE
from tests.clients.test_clients import CLIENTS, EMBEDDINGS

URL = "http://127.0.0.1:1"


def test_the_page_names_every_script() -> None:
    text = PAGE.read_text()
    assert [
        client.script for client in (*CLIENTS, EMBEDDINGS) if f"`{client.script}`" not in text
    ] == []


def test_the_page_tells_agents_where_the_server_is() -> None:
    codex, claude, opencode = AGENTS
    provider = tomllib.loads(codex.shown("toml", URL))["model_providers"]["local"]
    variables, _ = codex.command(URL)
    assert provider["base_url"] == f"{URL}/v1" and provider["env_key"] in variables
    assert claude.command(URL)[0]["ANTHROPIC_BASE_URL"] == URL
    provider = json.loads(opencode.shown("json", URL))["provider"]["local"]
    assert provider["options"]["baseURL"] == f"{URL}/v1"
