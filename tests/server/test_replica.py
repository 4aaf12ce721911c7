"""What routers, gateways and autoscalers read of a replica."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.messages import EngineStats
from jaxllm.server.command_line.options import parse
from jaxllm.server.metrics import load_metrics
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import RESOLVED
from tests.server.harness import Running, with_settings

ASK = {"endpoint-load-metrics-format": "TEXT"}
BODY = {"model": "fake", "prompt": "abc"}


def labels_of(server: Running, name: str) -> tuple[dict[str, str], float]:
    """The labels and the value of a metric with one sample."""
    families = text_string_to_metric_families(server.get("/metrics").body.decode())
    (sample,) = (s for family in families for s in family.samples if s.name == name)
    return sample.labels, sample.value


def test_gateways_learn_the_size_of_the_cache(fresh: Running) -> None:
    labels, value = labels_of(fresh, "vllm:cache_config_info")
    assert value == 1
    assert int(labels["block_size"]) == RESOLVED.page_size
    assert int(labels["num_gpu_blocks"]) == RESOLVED.num_pages


def test_gateways_learn_that_there_are_no_adapters_and_when(fresh: Running) -> None:
    before = int(time.time())
    labels, value = labels_of(fresh, "vllm:lora_requests_info")
    assert before <= value <= time.time()
    names = {name: labels[name] for name in labels if "lora" in name}
    assert names == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        ("vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    ],
)
def test_older_names_have_the_values_of_the_new_ones(fresh: Running, old: str, new: str) -> None:
    fresh.control.counted = {"prefix_queries": 977, "prefix_hits": 816}
    fresh.post("/v1/completions", BODY)
    assert labels_of(fresh, old) == labels_of(fresh, new)


@pytest.mark.parametrize("stream", [False, True])
def test_the_load_is_told_in_a_header_to_who_asks(server: Running, stream: bool) -> None:
    reply = server.post("/v1/completions", BODY | {"stream": stream}, **ASK)
    kind, _, pairs = reply.headers["endpoint-load-metrics"].partition(" ")
    found = dict(pair.split("=") for pair in pairs.split(", "))
    assert kind == "TEXT"
    assert {"named_metrics.kv_cache_usage_perc", "named_metrics.num_requests_waiting"} <= set(found)
    assert all(float(value) >= 0 for value in found.values())
    kind, _, text = (
        server.get("/health", **{"endpoint-load-metrics-format": "json"})
        .headers["endpoint-load-metrics"]
        .partition(" ")
    )
    assert (
        kind == "JSON"
        and json.loads(text)["named_metrics"].keys() == load_metrics([EngineStats()]).keys()
    )


@pytest.mark.parametrize("asked", [{}, {"endpoint-load-metrics-format": "BIN"}])
def test_nobody_else_gets_the_header(server: Running, asked: dict[str, str]) -> None:
    assert "endpoint-load-metrics" not in server.get("/health", **asked).headers


def test_load_counts_the_requests_that_generate(fresh: Running) -> None:
    assert fresh.get("/load").json() == {"server_load": 0}
    fresh.control.go.clear()
    with fresh.begin("/v1/completions", BODY):
        assert fresh.control.saw(lambda: bool(fresh.control.added))
        assert fresh.get("/load").json() == {"server_load": 1}
        fresh.control.go.set()


def test_routers_learn_what_runs(server: Running) -> None:
    info = server.get("/server_info").json()
    assert info == server.get("/get_server_info").json()
    assert info["served_model_name"] == "fake"
    assert info["max_total_num_tokens"] == RESOLVED.num_pages * RESOLVED.page_size
    assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (1, 1, 1)
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_routers_learn_where_events_are_published(tokenizer: Tokenizer, server: Running) -> None:
    assert server.get("/kv_event_sources").json() == []
    events = KVEventSettings(
        endpoint="tcp://*:5557", replay_endpoint="tcp://127.0.0.2:5558", topic="kv@pod@fake"
    )
    with Running(tokenizer, with_settings(kv_events=events)) as running:
        (source,) = running.get("/kv_event_sources").json()
    assert source == {
        "data_parallel_rank": 0,
        "endpoint": "tcp://127.0.0.1:5557",  # as this client reached the server
        "replay_endpoint": "tcp://127.0.0.2:5558",
        "topic": "kv@pod@fake",
    }


def test_illegal_settings_of_events_end_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"enable_kv_cache_events": true, "endpoint": "nowhere"}'
    with pytest.raises(SystemExit) as ended:
        parse(["--model", "demo", "--kv-events-config", config], {})
    assert ended.value.code == 2
    assert "--kv-events-config: endpoint must be an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    ["/server_info", "/get_server_info", "/is_sleeping", "/kv_event_sources", "/stats/stream"],
)
def test_nothing_is_told_of_a_model_that_is_not_served(server: Running, path: str) -> None:
    refused = server.get(f"{path}?model=another")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
