"""Command line > environment > file > default, and what an operator is told about it."""

from __future__ import annotations

import pathlib

import pytest

from jaxllm.server.command_line.layers import MAX_FILE
from jaxllm.server.command_line.options import Options, parse


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of options."""
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: some/model\nport: 9001\nmax-model-len: 32k\nserved-model-name: [a, b]\n"
        "api-key: of-the-file\nenable-prefix-caching: false\nno-page: true\n"
        "override-generation-config:\n  temperature: 0.5\ngpu_memory_utilization: 0.5\nuds:\n"
    )
    return path


def refusal(argv: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a start that is refused with status 2."""
    with pytest.raises(SystemExit) as exit:
        parse(argv, environ)
    assert exit.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_file_holds_options_under_their_long_names(config: pathlib.Path) -> None:
    options = parse(["--config", str(config)], {})
    engine, settings = options.config, options.settings
    assert (engine.model, options.port, engine.max_model_len) == ("some/model", 9001, 32_000)
    assert (settings.served, settings.api_keys) == (("a", "b"), ("of-the-file",))
    assert (engine.enable_prefix_caching, settings.page, options.uds) == (False, False, None)
    assert engine.gpu_memory_utilization == 0.5
    assert options.override_generation_config == {"temperature": 0.5}


def test_a_leader_worker_set_numbers_its_hosts(tmp_path: pathlib.Path) -> None:
    environ = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "jaxllm-0.jaxllm.default",
    }
    argv = ["-tp", "4", "--group-key-file", str(tmp_path / "key")]
    config = parse(argv, environ).config
    found = config.nnodes, config.node_rank, config.master_addr, config.master_port
    assert found == (2, 1, "jaxllm-0.jaxllm.default", 29501)
    alone = parse(["--nnodes", "1", "--node-rank", "0"], environ).config
    assert (alone.nnodes, alone.node_rank) == (1, 0)
    assert parse(argv, environ).max_engine_restarts == 0


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["-n", "2"], "--tensor-parallel-size 1 does not divide over --nnodes 2"),
        (["-n", "2", "-tp", "3"], "set it, or --pipeline-parallel-size, to a multiple of 2"),
        (
            ["-n", "2", "-pp", "3", "-tp", "2"],
            "--pipeline-parallel-size 3 does not divide over --nnodes 2, and a stage lies on one",
        ),
        (["-n", "4", "-pp", "2"], "set it to a multiple of 4, or leave it out and split layers"),
        (["-n", "2", "-pp", "2"], "set --group-key-file to a file with one"),
        (["-n", "2", "-tp", "2"], "set --group-key-file to a file with one"),
        (["-n", "2", "-r", "2", "-tp", "2"], "--node-rank 2 is none of the 2 of --nnodes"),
        (["-r", "1"], "they are numbered 0 to 0"),
        (["--master-port", "65535"], "from 1 to 65534"),
        (
            "-n 2 -tp 2 --group-key-file k --model a --model b".split(),
            "several hosts run one engine of one model",
        ),
        (
            "-n 2 -tp 2 -dp 2 --group-key-file k".split(),
            "several hosts run one engine of one model; start a group for each",
        ),
        ("-n 2 -tp 2 --group-key-file k --weight-cache-dir w".split(), "holds a part"),
        (
            ["-n", "2", "-tp", "2", "--group-key-file", "k", "--kv-transfer-config", "{}"],
            "no pages",
        ),
    ],
)
def test_hosts_that_make_no_group_are_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(argv, {}, capsys)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    config: pathlib.Path,
) -> None:
    environ = {
        "JAXLLM_CONFIG": str(config),
        "JAXLLM_PORT": "9002",
        "JAXLLM_MAX_MODEL_LEN": "16K",
        "JAXLLM_SERVED_MODEL_NAME": '["c", "d"]',
        "JAXLLM_ENABLE_PREFIX_CACHING": "true",
        "JAXLLM_NO_PAGE": "0",
    }
    options = parse(["another/model", "--port", "9003", "--api-key", "k1", "k2"], environ)
    assert (options.config.model, options.port) == ("another/model", 9003)
    assert options.config.max_model_len == 16_384
    assert options.settings.served == ("c", "d")
    assert options.settings.api_keys == ("k1", "k2")  # in place of the file's, not beside it
    assert (options.config.enable_prefix_caching, options.settings.page) == (True, True)
    assert options.config.gpu_memory_utilization == 0.5


def test_a_model_may_stand_before_options_or_after_them() -> None:
    for argv in (["a/b", "--port", "9001"], ["--port", "9001", "a/b"], ["--no-page", "a/b"]):
        assert parse(argv, {}).config.model == "a/b"


@pytest.mark.parametrize(
    ("argv", "unknown"),
    [
        (["a/b", "--no-page", "c/d"], "c/d"),
        (["--port", "9001", "a/b", "c/d"], "a/b c/d"),
        (["--enable-prefix-caching", "true"], "true"),
    ],
)
def test_a_word_that_is_no_model_is_refused(
    argv: list[str], unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(argv, {}, capsys).endswith(f"unrecognized arguments: {unknown}")


def test_variables_of_vllm_count_where_ours_say_nothing() -> None:
    environ = {"VLLM_API_KEY": "theirs", "VLLM_LOGGING_LEVEL": "DEBUG", "JAXLLM_API_KEY": ""}
    options = parse([], environ)
    assert (options.settings.api_keys, options.log_level) == (("theirs",), "debug")
    assert parse([], environ | {"JAXLLM_API_KEY": "ours"}).settings.api_keys == ("ours",)


def test_what_was_given_is_shown_with_its_source_and_no_secret(config: pathlib.Path) -> None:
    options = parse(
        ["--config", str(config), "--hf-token", "secret-1", "--port", "1"],
        {"JAXLLM_ADMIN_KEY": "secret-2", "JAXLLM_SEED": "7"},
    )
    assert "port=1 (command line)" in options.summary
    assert "seed=7 (JAXLLM_SEED)" in options.summary
    assert "max-model-len=32000 (server.yaml)" in options.summary
    assert "api-key=*** (server.yaml)" in options.summary
    assert "secret" not in options.summary
    assert "of-the-file" not in options.summary


def test_what_is_shown_of_options_stays_on_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text('served-model-name: ["a\\nb", "é"]\ncode-revision: "x\\ny"\n')
    shown = parse(["--config", str(path), "--uds", "s" * 1000], {}).summary
    assert len(shown.splitlines()) == 1
    assert "code-revision=" in shown
    assert len(shown) < 500


def test_a_service_named_jaxllm_sets_no_port_and_a_misspelt_variable_is_told() -> None:
    environ = {
        "JAXLLM_PORT": "tcp://10.0.0.7:8000",
        "JAXLLM_SERVICE_HOST": "10.0.0.7",
        "JAXLLM_PORT_8000_TCP_ADDR": "10.0.0.7",
        "JAXLLM_MAX_MODEL_LENGTH": "8k",
    }
    options = parse([], environ)
    assert options.port == 8000
    assert options.notices == (
        "the variable JAXLLM_MAX_MODEL_LENGTH is no option and has no effect "
        "(did you mean JAXLLM_MAX_MODEL_LEN?)",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 8", "'max-modle-len' is no option (did you mean max-model-len?)"),
        ("config: other.yaml", "a file names no other file; put its options here"),
        ("stall-timeout: soon", "stall-timeout: 'soon' is no number (write 4 or 0.5"),
        ("port: many", "port: 'many' is no number (write 8192"),
        ("max-model-len: 12q", "max-model-len: '12q' is no number"),
        ("no-page: perhaps", "no-page must be true or false, got 'perhaps'"),
        ("log-level: loud", "log-level must be one of debug, info, warning, error"),
        ("allowed-origins: [1]", "allowed-origins: '[1]' is no JSON list of strings"),
        ("port: 1\nport: 2", "no YAML in line 2: 'port' is there twice"),
        ("max-model-len: 8\nmax_model_len: 9", "'max_model_len' is there twice, under two names"),
        ("- port", "must hold options as `name: value`"),
        ("port: [", "no YAML in line 1"),
        ("port: !!python/object/apply:os.getcwd []", "no YAML in line 1"),
        ('ssl-certfile: "\\ud83d"', "ssl-certfile: 'utf-8' codec can't encode"),
        ("", "must hold options"),
        ("#" * (MAX_FILE + 1), "is larger than"),
    ],
    ids=range(16),
)
def test_a_file_that_cannot_be_is_refused_in_one_line(
    text: str, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert says in refusal(["--config", str(path)], {}, capsys)


def test_a_file_that_is_not_there_and_a_wrong_variable_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = refusal(["--config", str(tmp_path / "no")], {}, capsys)
    assert "cannot be read: No such file" in absent
    assert "JAXLLM_PORT: 'x' is no number (write 8192" in refusal([], {"JAXLLM_PORT": "x"}, capsys)
    unknown = refusal(["--no-such-flag", "--port", "1"], {}, capsys)
    assert "unrecognized arguments: --no-such-flag" in unknown


def keys_of(path: pathlib.Path, *argv: str) -> Options:
    return parse(["--api-key-file", str(path), *argv], {})


def test_keys_come_from_a_file_one_a_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    path.chmod(0o600)
    assert keys_of(path).settings.api_keys == ("first", "second")
    both = keys_of(path, "--api-key", "third", "--admin-key-file", str(path))
    assert both.settings.api_keys == ("third", "first", "second")
    assert both.settings.admin_keys == ("first", "second")
    assert both.notices == ()
    path.chmod(0o644)
    assert "can be read by every user" in keys_of(path).notices[0]
    path.write_text("# none yet\n")
    refused = refusal(["--api-key-file", str(path)], {}, capsys)
    assert "must have a key on each line" in refused
