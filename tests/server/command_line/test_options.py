"""The command line."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from jaxllm.config import NEUTRAL_ARGUMENTS, ConfigError, EngineConfig, human_int
from jaxllm.sampling.options import OPTIONS
from jaxllm.server.command_line.flags import ENGINE_FLAGS, SERVER_DEFAULTS, parser
from jaxllm.server.command_line.options import parse

TRANSFER = '{"kv_role": "kv_both", "kv_connector_extra_config": {"key_file": "/nowhere/key"}}'


def test_every_field_of_the_engines_configuration_has_a_flag_and_its_default() -> None:
    flagged = [name for flags in ENGINE_FLAGS.values() for name in flags]
    assert sorted(flagged) == sorted(field.name for field in dataclasses.fields(EngineConfig))
    assert parse([], {}).config == EngineConfig(**SERVER_DEFAULTS)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-model-len", "32K"], "max_model_len", 32_768),
        (["--max-model-len", "auto"], "max_model_len", "auto"),
        (["--max-model-len", "-1"], "max_model_len", -1),
        (["--max-model-len", "8192"], "max_model_len", 8192),
        (["-tp", "4"], "tensor_parallel_size", 4),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--model", "x", "--kv-cache-dtype", "auto"], "kv_cache_dtype", "auto"),
        (["--kv-cache-dtype=fp8"], "kv_cache_dtype", "fp8"),
        (["--no-async-scheduling"], "async_scheduling", False),
        (["--kv-cache-memory-bytes", "2G"], "kv_cache_memory_bytes", 2**31),
        (["--kv-cache-memory-bytes", "1.5 GiB"], "kv_cache_memory_bytes", 3 * 2**29),
        (["--dtype", "half"], "dtype", "half"), (["--enforce-eager"], "enforce_eager", True),
        (["some/model"], "model", "some/model"),
        (["--model", "x", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3",
            "--reasoning-parser", "DeepSeek-R1"], "model", "x"),
        (["--max-num-batched-tokens=4k"], "max_num_batched_tokens", 4000),
        (["--model", "x", "--trust-remote-code"], "model", "x"),
        (["--model", "x", "--tokenizer-mode", "auto", "--enable-chunked-prefill",
            "--pipeline-parallel-size", "1", "--swap-space", "4",
          "--data-parallel-size=1", "--cpu-offload-gb", "0"], "model", "x"),
    ],
    ids=str,
)  # fmt: skip
def test_flags_reach_the_configuration(argv: list[str], field: str, value: Any) -> None:
    assert getattr(parse(argv, {}).config, field) == value


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "70000"], ["--port", "x"], ["--gpu-memory-utilization", "1.5"],
        ["--gpu-memory-utilization", "0"], ["--dtype", "int8"],
        ["--max-model-len", "12q"], ["--max-model-len", "1.5"], ["--api-key", ""],
        ["--allowed-origins", '"*"'], ["--no-such-flag"],
        ["--default-chat-template-kwargs", "[1]"],
        ["--default-chat-template-kwargs", '{"tokenize": true}'], ["--max-body-size", "0"],
        ["--log-level", "loud"], ["--max-num-queued-tokens", "0"],
        ["--log-stats-interval", "-1"], ["--shutdown-timeout", "-1"], ["--served-model-name"],
        ["--load-format", "pickle"], ["--stream-interval", "0"],
        ["--allowed-origins", "x"], ["--override-generation-config", '{"top_p": 7}'],
        ["--override-generation-config", '{"bos": 7}'],
        ["--override-generation-config", "[]"], ["--kv-cache-dtype", "int8"],
        ["--kv-cache-dtype", "fp8_inc"],
        ["--tool-call-parser", "esperanto"], ["--reasoning-parser", "hermes"],
        ["--data-parallel-size", "0"], ["--data-parallel-size", "two"],
    ],
    ids=str,
)  # fmt: skip
def test_a_flag_that_cannot_be_is_refused_with_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(argv, {})
    assert exit.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("python -m jaxllm.server: error:")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--preemption-mode", "swap", "--swap-space", "4GiB"],
            "'4GiB' is no number (write 4 or 0.5, without a unit)",
        ),
        (
            ["--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", "2G"],
            "both say how large the KV pool is; leave one of them out",
        ),
        (["--max-stall-ms", "inf"], "must be milliseconds above 0 and below 1000000, got inf"),
        (
            ["--stream-interval", "3000000000"],
            "--stream-interval must be in [1, 2147483647], got 3000000000",
        ),
        (["--kv-transfer-config", '{"kv_role": "prefill"}'], "kv_role must be one of"),
        (["--kv-transfer-config", '{"kv_role": "kv_both"}'], "needs key_file"),
        (["--kv-transfer-config", TRANSFER], "give --kv-offloading-size"),
        (
            ["--kv-offloading-size", "1", "--kv-transfer-config", TRANSFER],
            "key_file '/nowhere/key' cannot be read",
        ),
    ],
)
def test_a_value_that_cannot_be_is_told_what_can(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(argv, {})
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2m", 2_000_000),
        ("1_000", 1000),
        ("1G", 2**30),
        ("2GiB", 2**31),
    ],
)
def test_human_integers(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1kk", "1.00001k", "0x10", "1e3", "ten", "2GB", "2iB", "2giB", "GiB"]
)
def test_what_is_no_human_integer(text: str) -> None:
    with pytest.raises(ConfigError):
        human_int(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-enable-chunked-prefill"], ["--tokenizer-mode", "slow"],
    ],
    ids=str,
)  # fmt: skip
def test_a_flag_of_a_feature_that_is_not_there_is_refused_by_name(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(argv, {})
    assert exit.value.code == 2
    assert f"error: {' '.join(argv)} is not supported yet" in capsys.readouterr().err


def test_every_neutral_argument_of_the_library_is_a_flag() -> None:
    args = vars(parser().parse_args([]))
    assert set(NEUTRAL_ARGUMENTS) <= set(args)


def test_an_override_reaches_the_options() -> None:
    assert parse(
        ["--override-generation-config", '{"temperature": 0}'], {}
    ).override_generation_config == {"temperature": 0}


def test_help_on_sampling_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(["--help=sampling"], {})
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in OPTIONS if name not in text] == []


@pytest.mark.parametrize(
    ("given", "value"),
    [("32k", 32_000), ("8192", 8192), ("AUTO", "auto"), (-1, -1), ("-1", -1), (None, None)],
)
def test_the_library_takes_the_lengths_that_the_command_line_takes(given: Any, value: Any) -> None:
    assert EngineConfig(max_model_len=given).max_model_len == value


@pytest.mark.parametrize("given", ["12q", "", True, 1.5, [1]])
def test_a_length_that_is_none_is_one_readable_error(given: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(max_model_len=given)


def test_keys_come_from_the_flags_else_from_the_environment() -> None:
    assert parse(
        ["--api-key", "a", "b", "--api-key", "c"], {"VLLM_API_KEY": "d"}
    ).settings.api_keys == ("a", "b", "c")
    assert parse([], {"VLLM_API_KEY": "d"}).settings.api_keys == ("d",)
    assert parse([], {"JAXLLM_API_KEY": "e", "VLLM_API_KEY": ""}).settings.api_keys == ("e",)
    assert parse([], {}).settings.api_keys == ()


def test_the_model_is_served_under_its_own_name_unless_others_are_given() -> None:
    assert parse(["--model", "a/b"], {}).settings.served == ("a/b",)
    assert parse(["--model", "a/b", "--served-model-name", "x", "y", "x"], {}).settings.served == (
        "x",
        "y",
    )


def test_help_is_in_groups_and_never_shows_a_key() -> None:
    text = parser().format_help()
    for group in (
        "Model:",
        "Memory:",
        "Scheduler:",
        "Parallel:",
        "Server:",
        "Security:",
        "Logging:",
    ):
        assert f"\n{group}\n" in text


def test_the_edge_imports_no_jax() -> None:
    code = (
        "import sys, jaxllm.server.lifecycle.serve, transformers; "
        "sys.exit(any(m in sys.modules for m in ('jax', 'torch', 'flax')))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL
        ).returncode
        == 0
    )
