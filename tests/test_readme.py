"""README.md says what is so: its commands work, its code runs, its tables are what the generators
print."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tools.readme_tables import PAGES as GENERATED
from tools.readme_tables import PART, TABLES, render

REPO = pathlib.Path(__file__).parents[1]
PAGES = {name: (REPO / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
SNIPPETS = [*PAGES.values(), (REPO / "docs" / "api.md").read_text()]
START_SECONDS = 240
# A process that compiles every shape takes a minute
FEW_SHAPES = """from tests.engine.few_shapes import few_shapes
few = few_shapes()
few.__enter__()
"""
EAGER = """import functools, jaxllm
jaxllm.LLM = functools.partial(jaxllm.LLM, enforce_eager=True)
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language on all pages, and on that of the API."""
    return [
        text
        for page in SNIPPETS
        for text in re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    ]


COMMANDS = [
    line
    for block in blocks("sh")
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
CURL = [line for line in COMMANDS if line.startswith("curl ")]
MAKE = [line for line in COMMANDS if line.startswith("make ")]
SERVE = [
    line
    for line in COMMANDS
    if re.match(r"\.venv/bin/(jaxllm serve|python -m jaxllm\.server) ", line)
]
CLIENT = [block for block in blocks("python") if "from openai import" in block]
LIBRARY = [block for block in blocks("python") if "from jaxllm import" in block]


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that was started by the recipe of `make serve`, with this interpreter and
    few programs to compile."""
    # What is asked for is compiled alone; tests/server/test_demo.py starts one that compiles all
    small = "ARGS=--max-num-seqs 1 --max-num-batched-tokens 64 --max-model-len 2048 --enforce-eager"
    command = shlex.split(make("-n", "serve", f"PORT={port}", small).stdout.splitlines()[-1])
    assert command[:2] == ["exec", ".venv/bin/python"]
    log = tmp_path_factory.mktemp("server") / "log"
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command[2:]], cwd=REPO, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready(url):
            assert process.poll() is None, f"the server ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, (
                f"the server was not ready in {START_SECONDS} s:\n{log.read_text()}"
            )
            time.sleep(0.2)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user would, also when these tests were started by make."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name not in ("PORT", "MODEL", "ARGS")
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def run_python(code: str) -> str:
    """Standard output of code in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_two_commands_are_make_serve_and_make_test():
    assert COMMANDS[:2] == ["make serve", "make test"]


def test_every_command_is_of_a_kind_that_a_test_covers():
    assert [line for line in COMMANDS if line not in CURL + MAKE + SERVE] == []


def test_every_python_block_is_run_by_a_test():
    assert [block for block in blocks("python") if block not in CLIENT + LIBRARY] == []


@pytest.mark.parametrize("line", MAKE)
def test_make_knows_the_target(line):
    assert make("-n", *shlex.split(line)[1:]).stdout


def test_every_make_target_is_in_the_help_and_declared_phony():
    makefile = (REPO / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert targets == set(re.findall(r"^([a-z][a-z-]*):.*## ", makefile, re.MULTILINE))
    assert targets == set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())


@pytest.mark.parametrize("line", SERVE)
def test_the_server_knows_the_options(line, monkeypatch):
    import jaxllm.server.__main__ as server
    from jaxllm import cli
    from jaxllm.server.command_line.options import parse

    seen = []
    monkeypatch.setattr(server, "main", lambda argv: seen.append(parse(argv, {})))
    words = shlex.split(line)
    cli.main(words[1:]) if words[0] == ".venv/bin/jaxllm" else server.main(words[3:])
    assert (seen[0].config.model, seen[0].port) == ("/path/to/model", 8000)


def test_every_verb_and_target_in_a_sentence_exists():
    from jaxllm.cli import VERBS

    text = PAGES["README.md"]
    verbs = re.search(r"the other verbs: ([^.]*)\.", text)[1]
    assert set(re.findall(r"`(\w+)`", verbs)) | {"serve", "check"} <= set(VERBS)
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    assert targets <= set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))


def test_the_generated_tables_are_up_to_date():
    texts = [page.read_text() for page in GENERATED]
    assert [render(text) for text in texts] == texts, "run `make readme`"
    assert {part["name"] for text in texts for part in PART.finditer(text)} == set(TABLES)


def test_every_link_and_folder_exists():
    links = [target for page in PAGES.values() for target in re.findall(r"\]\(([^)#:]+)\)", page)]
    folders = re.findall(r"^\| `([\w/]+/)` \|", PAGES["README.md"], re.MULTILINE)
    assert links
    assert folders
    assert [name for name in links + folders if not (REPO / name).exists()] == []


@pytest.mark.parametrize("page", sorted((REPO / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_that_defines_the_name(page):
    links = re.findall(r"\[(`?)([^]`]+)\1\]\(([^)#:]+)\)", page.read_text())
    for code, name, target in links:
        path = (page.parent / target).resolve()
        assert path.exists(), target
        if code and path.suffix == ".py":
            source = path.read_text()
            for part in name.split("."):
                assert re.search(rf"^ *(class|def) {part}\b|^{part}\b", source, re.M), (
                    name,
                    target,
                )


@pytest.mark.parametrize("line", CURL)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_the_right_answer(line, server):
    command = shlex.split(line.replace("http://localhost:8000", server))
    done = subprocess.run([*command, "-fsS"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "85" in json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("block", CLIENT)
def test_an_openai_client_streams_the_right_answer(block, server):
    assert re.search(r"2\D+7\D+9", run_python(block.replace("http://localhost:8000", server)))


@pytest.mark.parametrize("block", LIBRARY)
def test_the_library_answers_in_a_process_of_its_own(block):
    out = run_python(FEW_SHAPES + EAGER + block).splitlines()
    assert out[0].startswith("'12 + 34 ='")
    assert "85" in out[-1]
