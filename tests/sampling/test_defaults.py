"""What a generation_config.json may set, for the server and the library alike."""

from __future__ import annotations

import json
import logging
import pathlib

import pytest

from jaxllm.config import ConfigError
from jaxllm.sampling.defaults import checked_override, generation_config, sampling_defaults


def test_generation_config_is_read_or_empty(tmp_path: pathlib.Path) -> None:
    assert generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert generation_config(tmp_path) == {"temperature": 0.6}


@pytest.mark.parametrize(
    "text", ["[]", "{", "[" * 100_000, "\u00ff".encode("latin-1")], ids=range(4)
)
def test_what_is_no_json_object_is_one_readable_error(
    tmp_path: pathlib.Path, text: str | bytes
) -> None:
    (tmp_path / "generation_config.json").write_bytes(
        text.encode() if isinstance(text, str) else text
    )
    with pytest.raises(ConfigError, match=r"is not valid JSON|an object is expected"):
        generation_config(tmp_path)


def test_a_default_that_cannot_be_honoured_is_said_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = sampling_defaults(
            {
                "temperature": 0.7,
                "top_k": -1,
                "repetition_penalty": 1.05,
                "top_p": 7,
                "min_p": "x",
                "eos_token_id": 5,
            }
        )
    assert found == {"temperature": 0.7, "top_k": -1, "repetition_penalty": 1.05}
    assert [record.getMessage().split()[1] for record in caplog.records] == ["top_p", "min_p"]


def test_neutral_defaults_are_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        sampling_defaults(json.loads('{"repetition_penalty": 1.0, "top_p": null, "top_k": 20}'))[
            "top_k"
        ]
        == 20
    )
    assert caplog.records == []


@pytest.mark.parametrize(
    "wished",
    [{"top_p": 7}, {"eos_token_id": 1}, {"repetition_penalty": 0}, {"temperature": "hot"}],
    ids=str,
)
def test_an_override_that_cannot_be_is_refused_by_name(wished: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wished))):
        checked_override(wished)
