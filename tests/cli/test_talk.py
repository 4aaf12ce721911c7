"""`jaxllm chat` and `jaxllm complete` against a server."""

from __future__ import annotations

import io
import itertools
import socket
import struct
import threading
from typing import Any

import pytest

from jaxllm import cli
from jaxllm.cli.client import Client, Refused
from jaxllm.cli.talk import DIM, Conversation, chat, complete
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings


class Scripted(Client):
    """Answers each chat with what the test wrote; `asked` holds the bodies."""

    def __init__(self, *deltas: dict[str, str]):
        super().__init__("http://nowhere")
        self.deltas, self.asked = deltas, list[dict[str, Any]]()

    def events(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        yield {"choices": []}  # as with usage alone
        for delta in self.deltas:
            yield {"choices": [{"delta": delta}]}


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What the user types, through a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_quick_question_is_answered_and_the_verb_ends(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(["--url", server.url, "-q", "hello", "--max-tokens", "4"], {}) == 0
    streamed = capsys.readouterr().out
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
    }
    whole = server.post("/v1/chat/completions", body).json()
    assert streamed == whole["choices"][0]["message"]["content"] + "\n"


def test_texts_are_continued_line_by_line(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "abc\n\nde\\\nf\n")
    assert complete([f"--url={server.url}/v1", "--model=alias", "--temperature=0"], {}) == 0
    wanted = [
        server.post("/v1/completions", {"model": "fake", "prompt": text}).json()["choices"][0]
        for text in ("abc", "de\nf")
    ]
    assert capsys.readouterr().out == "".join(f"{choice['text']}\n" for choice in wanted)


def test_a_conversation_remembers_what_was_said_and_forgets_what_was_not_answered() -> None:
    client = Scripted({"reasoning": "hm"}, {"content": "one"}, {"content": " two"})
    talk = Conversation(client, {"model": "m"}, "be brief")
    assert list(talk.answer("first")) == [("hm", True), ("one", False), (" two", False)]
    assert [message["content"] for message in talk.messages] == ["be brief", "first", "one two"]
    stopped = talk.answer("second")
    assert list(itertools.islice(stopped, 2)) == [("hm", True), ("one", False)]
    stopped.close()
    assert talk.messages[-1]["content"] == "one"
    client.deltas = ()
    assert list(talk.answer("third")) == []
    assert talk.messages[-2]["content"] == "second"
    assert client.asked[-1]["messages"][-1]["content"] == "third"
    talk.reset(None)
    assert talk.messages == []


def test_lines_of_a_conversation_and_its_commands(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hello\n/reset\nhello\n/system be kind\nhello\n/exit\nnever\n")
    assert chat(["--url", server.url, "--max-tokens", "3"], {}) == 0
    first, again, kind = capsys.readouterr().out.splitlines()
    assert first == again
    assert len(kind) > 0


def test_reasoning_is_dimmed_at_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxllm.cli.talk import _show

    parts = [("hm", True), ("so", False)]
    _show(part for part in parts)
    assert capsys.readouterr().out == "hmso\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _show(part for part in parts)
    assert capsys.readouterr().out.startswith(f"{DIM}hm")


def test_keys_come_from_the_flag_or_the_environment(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(tokenizer, with_settings(api_keys=("key",))) as guarded:
        quick = ["--url", guarded.url, "-q", "a"]
        assert complete([*quick, "--api-key", "key"], {}) == 0
        assert complete(quick, {"VLLM_API_KEY": "key"}) == 0
        capsys.readouterr()
        assert complete(quick, {"OPENAI_API_KEY": "wrong"}) == 1
        assert "a valid API key is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "start one with `jaxllm serve MODEL`, or give --url"),
        (["--url", "nonsense"], "no server at nonsense"),
        (["--model", "other"], "other"),
        (["--temperature", "7"], "temperature"),
    ],
)
def test_what_a_server_refuses_is_one_line_and_status_1(
    flags: list[str], says: str, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    url = [] if "--url" in flags else ["--url", server.url]
    assert cli.main(["complete", *url, *flags, "-q", "a"]) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_what_json_cannot_hold_is_one_line(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ([], ["-q", "a\udcff"]):
        for verb in (chat, complete):
            stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8")
            monkeypatch.setattr("sys.stdin", stdin)
            assert verb(["--url", server.url, *argv], {}) == 1
            told = capsys.readouterr().err
            assert told == f"jaxllm {verb.__name__}: the text is not valid UTF-8\n"
    with pytest.raises(SystemExit):
        complete(["--temperature", "nan"], {})
    assert "must be a finite number, got nan" in capsys.readouterr().err


def test_an_answer_that_breaks_off_says_so(tokenizer: Tokenizer) -> None:
    with Running(tokenizer) as running:
        running.control.fail_step = "lost"
        with pytest.raises(Refused, match="engine"):
            list(Client(running.url).events("/completions", {"model": "fake", "prompt": "abc"}))
        running.control.fail_step = None


MODELS = b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}'
EVENTS = b"HTTP/1.1 200 OK\r\n\r\n"
STRANGE = "does not speak the OpenAI protocol"


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\n<html>"], STRANGE),
        ([b'HTTP/1.1 200 OK\r\n\r\n{"data": []}'], STRANGE),
        ([MODELS, EVENTS + b"data: {no\n\n"], STRANGE),
        ([MODELS, EVENTS + b"data: []\n\n"], STRANGE),
        ([MODELS, EVENTS + b'data: {"choices": 5}\n\n'], STRANGE),
        ([MODELS, EVENTS + b'data: {"error": "no"}\n\n'], STRANGE),
        ([MODELS, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata"], "before it was finished"),
        ([MODELS, b"RESET"], "no server at"),
        ([MODELS, EVENTS + b"RESET"], "server"),  # while the head is read, or after it
    ],
    ids=range(9),
)
def test_what_is_no_such_server_or_breaks_off_is_one_line_and_status_1(
    replies: list[bytes], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer_each, args=(listening, replies))
        answering.start()
        port: int = listening.getsockname()[1]
        assert cli.main(["chat", "--url", f"http://127.0.0.1:{port}", "-q", "a"]) == 1
        answering.join(20)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def answer_each(listening: socket.socket, replies: list[bytes]) -> None:
    """One reply for each connection; RESET at its end breaks that."""
    for reply in replies:
        sock, _ = listening.accept()
        with sock:
            sock.settimeout(20)
            sock.recv(1 << 16)
            sock.sendall(reply.removesuffix(b"RESET"))
            if reply.endswith(b"RESET"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
