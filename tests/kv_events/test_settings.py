"""--kv-events-config."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.load import open_publisher
from jaxllm.kv_events.settings import KVEventSettings, is_local

ON = {"enable_kv_cache_events": True}


def test_it_is_off_unless_it_is_turned_on() -> None:
    assert KVEventSettings.read(None) is None
    assert KVEventSettings.read({"publisher": "zmq"}) is None
    assert KVEventSettings.read(ON) == KVEventSettings()


def test_by_default_only_this_machine_hears() -> None:
    assert not KVEventSettings().exposed
    given = ON | {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558"}
    found = KVEventSettings.read(given)
    assert found is not None and found.exposed == ["tcp://*:5557", "tcp://0.0.0.0:5558"]


def test_addresses_of_this_machine_are_known() -> None:
    local = "tcp://127.0.0.1:1 tcp://127.9.9.9:1 tcp://[::1]:1 tcp://localhost:1 ipc:///tmp/a"
    assert all(map(is_local, local.split()))
    assert not any(map(is_local, "tcp://*:1 tcp://10.0.0.1:1 tcp://[::]:1 tcp://eth0:1".split()))


def test_it_connects_to_other_machines_alone_unless_told() -> None:
    binding = "tcp://*:5557 tcp://0.0.0.0:1 tcp://[::]:1 tcp://127.0.0.1:1 ipc:///tmp/a".split()
    connecting = "tcp://picker.default.svc.cluster.local:5557 tcp://10.0.0.7:5557".split()
    assert all(KVEventSettings(endpoint=one).binds for one in binding)
    assert not any(KVEventSettings(endpoint=one).binds for one in connecting)
    assert KVEventSettings(endpoint=connecting[1], bind=True).binds
    assert not KVEventSettings(endpoint=binding[3], bind=False).binds


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"enable_kv_cache_events": "yes"}, "must be true or false"),
        (ON | {"endpoints": "x"}, "'endpoints' is unknown; known are bind,"),
        (ON | {"endpoints": "x"}, "data_parallel_rank, enable_kv_cache_events, endpoint, format"),
        (ON | {"publisher": "kafka"}, "publisher must be zmq or null"),
        (ON | {"format": "json"}, "format must be map or array"),
        (ON | {"endpoint": "udp://a:1"}, "endpoint must be an address"),
        (ON | {"endpoint": "tcp://a:99999"}, "endpoint must be an address"),
        (ON | {"endpoint": None}, "endpoint must be an address"),
        (ON | {"replay_endpoint": 5558}, "replay_endpoint must be an address"),
        (ON | {"bind": "yes"}, "bind must be true or false"),
        (ON | {"buffer_steps": 0}, "buffer_steps must be a whole number"),
        (ON | {"hwm": True}, "hwm must be a whole number"),
        (ON | {"topic": "x" * 257}, "topic must be a text"),
    ],
)  # fmt: skip
def test_an_illegal_setting_says_what_is_legal(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        KVEventSettings.read(config)


def test_without_prefix_caching_there_is_nothing_to_tell() -> None:
    with pytest.raises(ConfigError, match="prefix caching is off"):
        open_publisher(EngineConfig(kv_events_config=dict(ON), enable_prefix_caching=False))
    quiet = ON | {"publisher": "null"}
    assert open_publisher(EngineConfig(kv_events_config=quiet, enable_prefix_caching=False)) is None
