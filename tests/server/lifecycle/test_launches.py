"""What each of several engine processes is started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.config import ConfigError
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.server.command_line.options import parse
from jaxllm.server.lifecycle.launches import Launch, engine_launches

ENGINE = ("engine",)


def launches(*flags: str, **environ: str) -> list[Launch]:
    return engine_launches(parse(["m", *flags], environ), Path("/m"))


def test_one_engine_sees_what_the_server_sees_unless_it_is_told_otherwise() -> None:
    (one,) = launches(CUDA_VISIBLE_DEVICES="3")
    assert one.command(ENGINE) == ENGINE
    (one,) = launches("--visible-devices", "1,2")
    assert one.command(ENGINE) == ("env", "CUDA_VISIBLE_DEVICES=1,2", "engine")


def test_each_engine_has_devices_of_its_own() -> None:
    assert [each.devices for each in launches("-dp", "2", "-tp", "2")] == ["0,1", "2,3"]
    given = launches("-dp", "3", "--visible-devices", "5,GPU-a,1,7", CUDA_VISIBLE_DEVICES="0")
    assert [each.devices for each in given] == ["5", "GPU-a", "1"]
    inherited = launches("-dp", "2", CUDA_VISIBLE_DEVICES="6,7")
    assert [each.devices for each in inherited] == ["6", "7"]
    assert [each.devices for each in launches("-dp", "2", CUDA_VISIBLE_DEVICES="")] == [None] * 2


def test_too_few_devices_are_one_line_that_says_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match="needs 4 devices, but 3 are visible") as refused:
        launches("-dp", "2", "-tp", "2", "--visible-devices", "0,1,2")
    assert "\n" not in str(refused.value)


def test_each_engine_traces_into_a_directory_of_its_own() -> None:
    directories = [each.config.profiler_dir for each in launches("-dp", "2", "--profiler-dir", "t")]
    assert directories == ["t/engine-0", "t/engine-1"]
    assert launches("--profiler-dir", "t")[0].config.profiler_dir == "t"


def test_several_engines_fetch_pages_and_send_none(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)

    def transferring(role: str, *argv: str) -> list[Launch]:
        config = {"kv_role": role, "kv_connector_extra_config": {"key_file": str(key_file)}}
        argv = (*argv, "--kv-offloading-size", "1", "--kv-transfer-config", json.dumps(config))
        return launches(*argv)

    assert len(transferring("kv_consumer", "-dp", "2")) == 2
    for role in ("kv_producer", "kv_both"):
        with pytest.raises(ConfigError, match="set it to kv_consumer") as refused:
            transferring(role, "-dp", "2")
        assert "\n" not in str(refused.value)
        assert len(transferring(role)) == 1


def test_each_engine_publishes_at_addresses_of_its_own() -> None:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "ipc:///tmp/replay",
    }
    found = [
        KVEventSettings.read(each.config.kv_events_config)
        for each in launches("-dp", "2", "--kv-events-config", json.dumps(config))
    ]
    assert [
        (each.endpoint, each.replay_endpoint, each.data_parallel_rank) for each in found if each
    ] == [
        ("tcp://*:5557", "ipc:///tmp/replay", 0),
        ("tcp://*:5558", "ipc:///tmp/replay-1", 1),
    ]
    away = KVEventSettings(endpoint="tcp://picker:5557").of_engine(3)  # that one binds
    assert (away.endpoint, away.data_parallel_rank) == ("tcp://picker:5557", 3)
    with pytest.raises(ConfigError, match="endpoint must be an address"):
        KVEventSettings(endpoint="tcp://*:65535").of_engine(1)
