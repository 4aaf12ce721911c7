"""`stream_interval` of requests and of the server."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.server.command_line.options import parse
from jaxllm.server.lifecycle.served_model import read_generation_config
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/responses": {"input": "abc"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_its_own_or_the_servers(
    tokenizer: Tokenizer, path: str, tmp_path: Any
) -> None:
    argv = ["--model", "demo", "--generation-config", "vllm", "--stream-interval", "5"]
    defaults = read_generation_config(parse(argv, {}), tmp_path)
    with Running(tokenizer, defaults=defaults) as running:
        for own, expected in (({}, 5), ({"stream_interval": 2}, 2), ({"stream_interval": 1}, 1)):
            answer = running.post(path, {"model": "fake", "stream": True} | BODIES[path] | own)
            assert answer.status == 200
            assert running.control.added[-1].params.stream_interval == expected
        search = {"model": "fake", "use_beam_search": True, "temperature": 0} | BODIES[COMPLETIONS]
        assert running.post(COMPLETIONS, search).status == 200


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_it_is_a_number_from_one(server: Running, value: Any) -> None:
    answer = server.post(
        COMPLETIONS, {"model": "fake", "stream_interval": value} | BODIES[COMPLETIONS]
    )
    assert (answer.status, answer.error["param"]) == (400, "stream_interval")


@pytest.mark.parametrize("value", ["0", "-3", "x"])
def test_the_flag_is_a_number_from_one(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "demo", f"--stream-interval={value}"], {})
    assert "--stream-interval" in capsys.readouterr().err
