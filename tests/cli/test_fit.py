"""`jaxllm check`."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from jaxllm import cli, weights
from jaxllm.cli import fit
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.started import check_fit


def test_a_model_that_fits_is_shown_as_it_would_be_served_and_nothing_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["check", "demo", "--max-num-seqs", "4", "--max-model-len", "1K"]) == 0
    text = capsys.readouterr().out
    assert "it fits" in text
    assert "4.00x at 1024 tokens per request" in text
    assert "an estimate" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["demo", "--kv-cache-memory-bytes", "1000"], "What helps: "),
        (["demo", "--max-model-len", "1m"], "is longer than the model allows (2048 tokens)"),
        (["demo", "-tp", "999"], "999"),
    ],
    ids=range(3),
)
def test_what_does_not_fit_is_status_1_with_the_reason_and_what_helps(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxllm check: ")
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_of_several_models_each_is_checked_with_options_of_its_own(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    entry = "- {{model: {}, served-model-name: {}, num-gpu-blocks-override: {}}}\n"
    fits, small = entry.format("demo", "a", 200), entry.format("demo", "b", 1)
    config.write_text(f"models:\n{fits}{small}{entry.format('/nowhere', 'c', 200)}")
    assert cli.main(["check", "--config", str(config)]) == 1
    captured = capfd.readouterr()
    assert "a fits" in captured.out
    second, third = captured.err.splitlines()
    assert second.startswith("jaxllm check: b: to serve one request")
    assert third.startswith("jaxllm check: c: no model at /nowhere")
    config.write_text(f"models:\n{fits}{entry.format('demo', 'b', 300)}")
    assert cli.main(["check", "--config", str(config)]) == 0
    assert "b fits" in capfd.readouterr().out


def test_options_of_several_models_are_read_once(capfd: pytest.CaptureFixture[str]) -> None:
    given, end = os.pipe()
    entry = "- {{model: demo, served-model-name: {}, num-gpu-blocks-override: 200}}\n"
    os.write(end, f"models:\n{entry.format('a')}{entry.format('b')}".encode())
    os.close(end)
    assert cli.main(["check", "--config", f"/dev/fd/{given}"]) == 0
    os.close(given)
    assert "b fits" in capfd.readouterr().out


def test_a_process_that_cannot_tell_whether_its_model_fits_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("models:\n- {model: demo, served-model-name: a}\n- {model: demo}\n")
    monkeypatch.setattr(fit, "_check_entry", end_with_seven)
    assert cli.main(["check", "--config", str(config)]) == 1
    assert "a: the process that checked it ended with 7" in capfd.readouterr().err


def end_with_seven(*_: object) -> None:
    """In place of a check."""
    raise SystemExit(7)


def test_engines_of_one_model_that_cannot_be_are_told(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    transfer = {"kv_role": "kv_both", "kv_connector_extra_config": {"key_file": str(key)}}
    flags = ["--kv-offloading-size", "1", "--kv-transfer-config", json.dumps(transfer)]
    assert cli.main(["check", "demo", "-dp", "2", *flags]) == 1
    assert "set it to kv_consumer" in capsys.readouterr().err


def test_a_directory_without_a_model_and_a_wrong_flag_are_told(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "there is no config.json in it" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        cli.main(["check", "demo", "--max-num-sqes", "4"])
    assert exit.value.code == 2
    assert "jaxllm check: error: unrecognized arguments" in capsys.readouterr().err


def test_a_device_whose_largest_step_does_not_fit_by_the_estimate_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start would compile the step before it says so."""
    small = MemoryBudget(usable=1 << 26, weights=1 << 24, workspace=1 << 26, shared=False)
    monkeypatch.setattr("jaxllm.engine.startup.model_plan.measure_budget", lambda *_: small)
    with pytest.raises(ConfigError, match=r"is lacking for the rest.*What helps"):
        check_fit(EngineConfig(model="demo"))


REFUSING = "{{ raise_exception('never') }}"
WANTING = (
    "{%- for message in messages -%}{{ message.content }}{%- for call in message.tool_calls -%}"
    "{{ call.function.arguments + '' }}{%- endfor -%}{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, ["its chat template", "arguments of calls", "objects or text", "several"]),
        (WANTING, ["arguments of calls", "text"]),
        (REFUSING, ["fault", "never; histories stay as they are"]),
    ],
    ids=["its own", "of text", "refusing"],
)
def test_what_the_chat_template_shows_is_said(
    template: str | None,
    says: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = [] if template is None else ["--chat-template", template]
    assert cli.main(["check", "demo", "--max-num-seqs", "4", "--max-model-len", "1K", *flags]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in says)
    assert ("objects" in text) is (template is None)
