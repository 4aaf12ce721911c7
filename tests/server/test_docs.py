"""The pages of docs on the server say what is."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest
from starlette.routing import Route

from jaxllm.server.app import routes
from jaxllm.server.command_line.flags import parser
from jaxllm.server.command_line.options import parse, parse_models
from jaxllm.server.errors import ContextOverflow
from jaxllm.server.middleware.auth import is_open
from tests.server.harness import Running


def test_the_page_lists_every_route_and_whether_it_needs_a_key(
    repo: pathlib.Path, fresh: Running
) -> None:
    listed = {}
    for line in (repo / "docs" / "api.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[2] in ("yes", "no"):
            listed |= dict.fromkeys(
                re.findall(r"`(GET|POST|DELETE) ([^`]+)`", cells[1]), cells[2] == "yes"
            )
    actual = {}
    for route in routes(fresh.server_state).routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "")
        actual |= {
            (method, path): not is_open(path) for method in (route.methods or set()) - {"HEAD"}
        }
    assert listed == actual


@pytest.mark.parametrize(
    "name",
    [
        *("server", "api", "operate", "hosts"),
        *("troubleshooting", "security", "deploy", "sizing"),
    ],
)
def test_a_page_names_only_flags_and_metrics_that_exist(
    repo: pathlib.Path, fresh: Running, name: str
) -> None:
    text = (repo / "docs" / f"{name}.md").read_text()
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    of_convert = {"--as-served"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags | {"--help"} | of_convert
    metrics = fresh.get("/metrics").body.decode()
    for metric in re.findall(r"`((?:vllm|jaxllm):[a-z0-9_]+)`", text):
        assert metric in metrics


def snippets(repo: pathlib.Path, name: str, language: str) -> list[str]:
    """The fenced blocks of a page of docs."""
    text = (repo / "docs" / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_commands_of_several_servers_and_hosts_are_legal(
    repo: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("key", "group.key"):
        (tmp_path / name).write_text("0" * 64)
    blocks = snippets(repo, "hosts.md", "(?:ba)?sh")
    lines = [line for block in blocks for line in block.splitlines() if "openssl" not in line]
    assert len(lines) == 4
    for line in lines:
        arguments = line.split("jaxllm serve " if "jaxllm serve " in line else "jaxllm.server ")[1]
        assert parse(shlex.split(arguments), {}).config.model == "MODEL"


def test_the_file_of_several_models_is_legal(repo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (text,) = snippets(repo, "server.md", "yaml")
    path = tmp_path / "server.yaml"
    path.write_text(text)
    chat, embedding = parse_models(["--config", str(path)], {})
    assert chat.settings.served == ("chat",)
    assert embedding.config.gpu_memory_utilization == 0.2


def test_prompts_that_are_too_long_are_refused_in_the_words_of_the_page(
    repo: pathlib.Path,
) -> None:
    (text,) = snippets(repo, "api.md", "text")
    counted = ContextOverflow(2048, 2060, None)
    by_text = ContextOverflow(2048, 3125, None, counted="50000 characters")
    assert text.splitlines() == [counted.message, by_text.message]
