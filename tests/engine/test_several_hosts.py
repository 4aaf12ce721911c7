"""An engine over several processes, each with devices of its own, is the engine of one."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from tests.engine.host import FAIL, WISHES, generate

pytestmark = pytest.mark.slow  # processes that compile
SECONDS = 300


def free_port() -> int:
    """One that is free, and the next, too; below those that the system gives to connections."""
    for port in range(20_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        try:
            for at in (port, port + 1):
                socket.create_server(("127.0.0.1", at)).close()
            return port
        except OSError:
            continue
    raise AssertionError("no two ports are free")


@pytest.fixture
def start(tmp_path: pathlib.Path, tiny_dir: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts one host of a group; keywords override its configuration."""
    (tmp_path / "key").write_text("a key of sixteen bytes or more")
    group = {"group_key_file": str(tmp_path / "key"), "master_port": free_port()}
    # One device a process, unless it says otherwise
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environ = os.environ | {"XLA_FLAGS": " ".join(flags)}
    started: list[subprocess.Popen[str]] = []

    def start(**wishes: Any) -> subprocess.Popen[str]:
        config = {"model": tiny_dir, **group, **wishes}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.engine.host", json.dumps(config)],
                env=environ,
                text=True,
                **pipes,  # type: ignore[call-overload]
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask(leader: subprocess.Popen[str]) -> list[Any]:
    """A round of the controller."""
    assert leader.stdin is not None and leader.stdout is not None
    print(file=leader.stdin, flush=True)
    for line in leader.stdout:
        if line.startswith("[["):  # Gloo writes lines of its own
            return json.loads(line)
    raise AssertionError(leader.communicate(timeout=SECONDS))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what it said at last."""
    _, said = process.communicate(timeout=SECONDS)
    return process.returncode, said


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_generate_what_one_with_as_many_devices_does(
    hosts: int, start, make_engine: Callable[..., Engine]
) -> None:
    group = [
        start(nnodes=hosts, node_rank=rank, tensor_parallel_size=hosts) for rank in range(hosts)
    ]
    found = ask(group[0])
    assert found == generate(make_engine(**WISHES, tensor_parallel_size=hosts))
    assert found[-1] is True
    assert [ended(host)[0] for host in group] == [0] * hosts


def test_a_host_with_two_devices_counts_twice(start, make_engine) -> None:
    group = [start(nnodes=2, node_rank=rank, tensor_parallel_size=4) for rank in range(2)]
    assert ask(group[0]) == generate(make_engine(**WISHES, tensor_parallel_size=4))
    assert [ended(host)[0] for host in group] == [0, 0]


@pytest.fixture
def deep(tmp_path: pathlib.Path, tiny_dir: str) -> str:
    """A model of four layers."""
    config = json.loads((pathlib.Path(tiny_dir) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("hosts", "stages", "devices"),
    [(2, 2, 1), (2, 2, 2), (2, 4, 1), (4, 4, 1)],
    ids=["a stage each", "of two devices", "two stages each", "four hosts"],
)
def test_stages_on_several_hosts_generate_what_one_device_does(
    hosts: int, stages: int, devices: int, start, deep: str, make_engine: Callable[..., Engine]
) -> None:
    wishes = {"model": deep, "pipeline_parallel_size": stages, "tensor_parallel_size": devices}
    group = [start(nnodes=hosts, node_rank=rank, **wishes) for rank in range(hosts)]
    *found, swapped = ask(group[0])
    *expected, _ = generate(make_engine(**WISHES, model=deep))
    assert found == expected and swapped
    assert [ended(host)[0] for host in group] == [0] * hosts


def test_stages_on_several_hosts_compile_nothing_once_they_are_warm(
    start, make_engine: Callable[..., Engine]
) -> None:
    wishes = {"nnodes": 2, "pipeline_parallel_size": 2, "enforce_eager": False}
    group = [start(node_rank=rank, **wishes) for rank in range(2)]
    *found, swapped = ask(group[0])
    *expected, _ = generate(make_engine(**WISHES))
    assert found == expected and swapped
    assert [ended(host)[0] for host in group] == [0, 0]


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_killed_ends_the_group_with_one_line(victim: int, split: str, start) -> None:
    group = [start(nnodes=2, node_rank=rank, **{split: 2}) for rank in range(2)]
    ask(group[0])
    print(file=group[0].stdin, flush=True)  # a round that never ends
    group[victim].kill()
    status, said = ended(group[1 - victim])
    # JAX's own watch over the controller may be first, and aborts
    assert status in ((75,) if victim else (75, -6)), said
    if status == 75:
        who = "host 1 of 2" if victim else "the controller at 127.0.0.1"
        assert f"{who}" in said and "the whole group ends" in said


def test_a_controller_that_fails_ends_the_group_as_a_failure(start) -> None:
    group = [start(nnodes=2, node_rank=rank, tensor_parallel_size=2) for rank in range(2)]
    print(FAIL, file=group[0].stdin, flush=True)
    status, said = ended(group[1])
    assert status == 75, said
    assert "has ended: its engine process has ended; the whole group ends" in said


def test_a_host_between_two_others_that_is_killed_ends_both_and_the_controller(
    start, deep: str
) -> None:
    wishes = {"nnodes": 4, "pipeline_parallel_size": 4, "model": deep}
    group = [start(node_rank=rank, **wishes) for rank in range(4)]
    ask(group[0])
    print(file=group[0].stdin, flush=True)  # a round that never ends
    group.pop(2).kill()
    for host in group:
        status, said = ended(host)
        assert status == 75 and "host 2 of 4 has gone" in said, said


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"max_num_seqs": 3}, "--max-num-seqs is 3 here and 4 on the controller"),
        ({"node_rank": 1, "seed": 1}, "--seed is 1 here and 0 on the controller"),
    ],
)
def test_a_host_with_other_options_is_refused_in_one_line(
    wishes: dict[str, Any], told: str, start
) -> None:
    usual = {"nnodes": 2, "tensor_parallel_size": 2}
    leader, other = start(**usual, node_rank=0), start(**usual | {"node_rank": 1} | wishes)
    status, said = ended(other)
    assert status == 1 and told in said and said.count("\n") == 1
    assert leader.poll() is None


def test_a_host_that_cannot_start_tells_the_controller_why(start) -> None:
    usual = {"nnodes": 2, "tensor_parallel_size": 4}
    leader = start(**usual, node_rank=0)
    other = start(**usual, node_rank=1, compilation_cache_dir="/dev/null/none")
    status, said = ended(other)
    assert status == 1
    assert "error: --compilation-cache-dir /dev/null/none cannot be used" in said
    status, heard = ended(leader)
    assert status == 75
    assert "host 1 of 2 has ended: --compilation-cache-dir /dev/null/none cannot be used" in heard


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_is_one_line(offset: int, start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port + offset)):
        leader = start(nnodes=2, node_rank=0, tensor_parallel_size=2, master_port=port)
        status, said = ended(leader)
    assert status == 1 and said.count("\n") == 1
    assert f"port {port + offset} of 127.0.0.1 is taken" in said
