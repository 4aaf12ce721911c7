"""The `jaxllm` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

import jaxllm
from jaxllm import cli, environment, models


def test_help_and_version_answer_without_loading_jax(repo):
    code = (
        "import sys; from jaxllm.cli import main; main(['--help']); main(['--version']); "
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == jaxllm.__version__
    assert all(verb in done.stdout for verb in cli.VERBS)


@pytest.mark.parametrize(
    "given",
    [
        ["jaxllm", "serve", "--help=all"],
        ["jaxllm.server", "--help=all"],
        ["jaxllm", "models"],
        ["jaxllm", "no_such_verb"],
    ],
)
def test_a_reader_that_leaves_ends_a_verb_quietly(given, repo):
    """Nothing is read, as when `| head` has ended; what failed otherwise keeps its status."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", *given]
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            command, cwd=repo, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60
        )
    if "no_such_verb" in given:
        assert done.returncode == 2
        assert "unknown verb" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (141, "")


def test_a_verb_runs_without_an_output(repo):
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "jaxllm", "--help"]
    done = subprocess.run(command, cwd=repo, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_convert_says_where_options_of_serve_go(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        cli.main(["convert", "demo", str(tmp_path / "new"), "--quantization", "int4"])
    assert exit.value.code == 2
    assert "--quantization int4; options of serve go with --as-served" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_verb_prints_the_help(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out == cli.USAGE


def test_an_unknown_verb_is_named_and_fails(capsys):
    assert cli.main(["sevre", "demo"]) == 2
    assert "unknown verb 'sevre'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["demo", "--port", "1"], ["--model", "demo", "--port", "1"]),
        (["--model", "demo"], ["--model", "demo"]),
        ([], []),
    ],
)
def test_serve_passes_its_model_to_the_server(given, passed, monkeypatch):
    seen = []
    fake = types.ModuleType("jaxllm.server.__main__")
    fake.main = seen.append
    monkeypatch.setitem(sys.modules, "jaxllm.server.__main__", fake)
    assert cli.main(["serve", *given]) == 0
    assert seen == [passed]


def test_bench_serve_is_the_benchmark_of_a_server(repo, capsys, monkeypatch):
    # A process that imported the module would be warned that it runs a second time.
    monkeypatch.delitem(sys.modules, "benchmarks.serving", raising=False)
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "serve", "--help"])
    assert exit.value.code == 0
    assert "--request-rate" in capsys.readouterr().out


def test_bench_outside_a_checkout_says_where_to_run_it(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from jaxllm.cli import main; "
            "sys.exit(main(['bench', 'no_such_benchmark']))",
        ],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(jaxllm.__path__[0]).removesuffix("/jaxllm"),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "run it from a checkout" in done.stderr


def test_collect_env_prints_versions_and_devices_as_json(capsys):
    assert cli.main(["collect-env"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jaxllm"] == jaxllm.__version__
    assert found["devices"][0]["platform"] == "cpu"
    assert {"jax", "flax", "transformers"} <= set(found["packages"])
    assert found["cpu_cores"] >= 1


def test_collect_env_refuses_options(capsys):
    assert cli.main(["collect-env", "--all"]) == 2
    assert "no options" in capsys.readouterr().err


def test_the_processor_is_read_from_cpuinfo_where_there_is_one(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    assert environment.processor(str(tmp_path / "cpuinfo")) == "Example 9000"
    assert environment.processor(str(tmp_path / "absent"))


def test_models_lists_every_family_without_loading_jax(repo):
    code = (
        "import sys; from jaxllm.cli import main; main(['models']); sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert sorted(rows) == models.families()
    assert rows["qwen3"].startswith("generates or pools  Qwen3: Qwen2 with norms")
    assert rows["bert"].startswith("pools               BERT: an encoder")


@pytest.mark.parametrize("verb", sorted(cli.VERBS.keys() - {"bench"}))
def test_every_verb_answers_help(verb, capsys):
    try:
        status = cli.main([verb, "--help"])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert shown.out.startswith("usage: ")


def test_models_takes_no_options(capsys):
    assert cli.main(["models", "--all"]) == 2
    assert "takes no options" in capsys.readouterr().err
