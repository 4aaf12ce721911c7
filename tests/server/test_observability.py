"""Probes and metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxllm
from jaxllm.messages import STEP_TOKENS
from jaxllm.server.logs import JsonFormatter
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings

DASHBOARD = """
vllm:e2e_request_latency_seconds_bucket vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum
""".split()


def samples(server: Running) -> dict[str, float]:
    """Every sample without extra labels beyond model and engine, and request_success by reason."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"
            extra = {
                name: value
                for name, value in sample.labels.items()
                if name not in ("model_name", "engine")
            }
            found[sample.name + "".join(f"[{value}]" for value in extra.values())] = sample.value
    return found


def test_the_fifteen_names_of_the_stock_dashboard_are_there_from_the_start(fresh: Running) -> None:
    names = {name.partition("[")[0] for name in samples(fresh)}
    assert len(DASHBOARD) == 15
    assert set(DASHBOARD) <= names
    ends = {"stop", "length", "abort", "error"}  # all that an engine says
    finished = {n for n in samples(fresh) if n.startswith("vllm:request_success_total")}
    assert finished == {f"vllm:request_success_total[{end}]" for end in ends}
    assert {"jaxllm:compiles_after_warmup_total", "jaxllm:build_info"} <= names


def test_requests_move_the_metrics_that_dashboards_show(fresh: Running) -> None:
    fresh.post("/v1/completions", {"model": "alias", "prompt": "abcd", "n": 2})
    fresh.post(
        "/v1/completions", {"model": "fake", "prompt": "xyz", "stream": True, "max_tokens": 2}
    )
    found = samples(fresh)
    assert found["vllm:prompt_tokens_total"] == 7
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:request_success_total[stop]"] == 2
    assert found["vllm:request_success_total[length]"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 7
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_prompt_tokens_sum"] == 4 + 4 + 3
    assert found["vllm:request_generation_tokens_sum"] == 4 + 4 + 2
    assert found["vllm:request_max_num_generation_tokens_sum"] == 4 + 2
    assert found["vllm:request_queue_time_seconds_count"] == 3
    assert found["vllm:num_requests_running"] == 0
    assert found["jaxllm:compiles_after_warmup_total"] == 0
    assert found[f"jaxllm:build_info[{jaxllm.__version__}]"] == 1


def test_what_the_engine_counts_of_memory_is_shown_as_it_is(fresh: Running) -> None:
    counted = {
        "prefix_queries": 977,
        "prefix_hits": 816,
        "preemptions": 5,
        "pages_saved": 31,
        "pages_loaded": 23,
    }
    names = (
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:num_preemptions",
        "jaxllm:pages_saved",
        "jaxllm:pages_loaded",
    )
    before = samples(fresh)
    assert [before[f"{name}_total"] for name in names] == [0] * 5
    fresh.control.counted = counted
    # Statistics come with what was generated
    fresh.post("/v1/completions", {"model": "fake", "prompt": "a"})
    found = samples(fresh)
    assert [found[f"{name}_total"] for name in names] == list(counted.values())


def test_the_sizes_of_steps_are_a_histogram(fresh: Running) -> None:
    name = "vllm:iteration_tokens_total"
    assert samples(fresh)[f"{name}_count"] == 0
    counts = (5, 0, 2, *[0] * (len(STEP_TOKENS) - 3), 1)
    fresh.control.counted = {"step_tokens": counts, "computed_tokens": 20_037}
    fresh.post("/v1/completions", {"model": "fake", "prompt": "a"})
    found = samples(fresh)
    assert [found[f"{name}_bucket[{bound}]"] for bound in ("1.0", "8.0", "16.0")] == [5, 5, 7]
    assert found[f"{name}_bucket[16384.0]"] == 7
    assert found[f"{name}_bucket[+Inf]"] == found[f"{name}_count"] == 8
    assert found[f"{name}_sum"] == 20_037


def test_choices_wait_for_their_turn_or_for_something_else(fresh: Running) -> None:
    fresh.control.counted = {"waiting": 5, "deferred": 2}
    fresh.post("/v1/completions", {"model": "fake", "prompt": "a"})
    found, name = samples(fresh), "vllm:num_requests_waiting"
    assert found[name] == 5
    assert found[f"{name}_by_reason[capacity]"] == 3
    assert found[f"{name}_by_reason[deferred]"] == 2


def test_what_a_request_computed_and_how_often_it_was_preempted(fresh: Running) -> None:
    fresh.post("/v1/completions", {"model": "fake", "prompt": "a" * 40, "n": 2})  # 16 are cached
    fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"})
    found = samples(fresh)
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 24 + 3
    assert found["vllm:request_prefill_kv_computed_tokens_count"] == 2
    assert found["vllm:prompt_tokens_cached_total"] == 16
    assert found["vllm:request_num_preemptions_count"] == 3
    assert found["vllm:request_num_preemptions_bucket[0.0]"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_prefix_was_not_found_is_counted_and_logged(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {"model": "fake", "prompt": "a text of twenty-odd", "stream": stream, "n": 2}
    with (
        caplog.at_level("INFO", "jaxllm.server"),
        Running(tokenizer, with_settings(log_requests=True)) as server,
    ):
        server.post("/v1/completions", body)
        server.control.prefix_miss = "salt"
        server.post("/v1/completions", body)
        found = samples(server)
    assert found["jaxllm:prefix_misses_total[salt]"] == 1
    assert found["jaxllm:prefix_misses_total[evicted]"] == 0
    lines = [line for line in caplog.records if "tokens cached" in line.getMessage()]
    assert [line.getMessage().partition(": ")[2] for line in lines] == [
        "16 tokens cached",
        "16 tokens cached, then salt",
    ]
    entries = [json.loads(JsonFormatter().format(line)) for line in lines]
    assert [entry["prefix_misses"] for entry in entries] == [[None], ["salt"]]
    assert [entry["cached_tokens"] for entry in entries] == [[16], [16]]


def test_clients_cannot_add_series(fresh: Running) -> None:
    def series() -> int:
        return len(re.findall(rb"^[^#]", fresh.get("/metrics").body, re.MULTILINE))

    before = series()
    for number in range(50):
        fresh.request(f"METHOD{number}", f"/path{number}")
        fresh.post(
            "/v1/completions", {"model": f"model {number}", "prompt": "a", f"field{number}": 1}
        )
    assert series() == before


def test_probes_answer_without_the_engine(fresh: Running) -> None:
    fresh.control.go.clear()
    with fresh.begin("/v1/completions", {"model": "fake", "prompt": "abc"}) as sock:
        assert fresh.control.saw(lambda: len(fresh.control.added) == 1)
        assert fresh.get("/health").json()["status"] == "ok"
        assert fresh.get("/ready").json() == {"status": "ready"}
        assert fresh.get("/version").json() == {"version": jaxllm.__version__}
        assert fresh.get("/ping").status == 200
        assert fresh.request("POST", "/ping").status == 200
        fresh.control.go.set()
        assert sock.status() == 200


def test_draining_refuses_new_work_but_answers_probes(fresh: Running) -> None:
    fresh.server_state.draining = True
    answer = fresh.post(
        "/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    )
    assert answer.status == 503
    assert (answer.error["type"], answer.error["code"], answer.headers["retry-after"]) == (
        "overloaded_error",
        "draining",
        "1",
    )
    assert fresh.get("/ready").status == 503
    assert fresh.get("/health").status == 200
    assert fresh.get("/metrics").status == 200


def test_logged_requests_show_no_text_of_the_client(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {
        "model": "fake",
        "prompt": "hidden prompt",
        "stop": ["hidden stop", "other"],
        "seed": 12345,
        "max_tokens": 3,
    }
    with (
        caplog.at_level("INFO", "jaxllm.server"),
        Running(tokenizer, with_settings(log_requests=True)) as server,
    ):
        assert server.post("/v1/completions", body).status == 200
    line = next(
        record.getMessage() for record in caplog.records if "prompts of" in record.getMessage()
    )
    assert "1 prompts of [13] tokens, with" in line
    assert {"seed", "max_tokens", "stop[2]"} == set(line.split("with ")[1].split(", "))


def test_tokenize_and_detokenize_are_each_others_inverse(server: Running) -> None:
    tokens = server.post(
        "/tokenize", {"model": "fake", "prompt": "héllo", "return_token_strs": True}
    ).json()
    assert tokens["count"] == 6
    assert tokens["max_model_len"] == 256
    assert tokens["token_strs"] == ["h", "\ufffd", "\ufffd", "l", "l", "o"]
    assert server.post("/detokenize", {"model": "fake", "tokens": tokens["tokens"]}).json() == {
        "prompt": "héllo"
    }
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_an_idle_engine_checks_itself_after_work_and_says_what_it_found(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxllm.server.engine.process.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("jaxllm.server.engine.process.CHECK_SECONDS", 0.0)
    caplog.set_level("INFO", logger="jaxllm.server")
    with Running(tokenizer) as running:
        for number, problem in ((1, ""), (2, "page 3 is neither free nor used")):
            running.control.broken = problem
            running.post("/v1/completions", {"model": "fake", "prompt": "abcd"})
            assert until(
                lambda number=number: running.server_state.client.stats.self_checks >= number
            )
        found = samples(running)
    assert (found["jaxllm:self_checks_total"], found["jaxllm:self_check_failures_total"]) == (2, 1)
    said = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "self-check" in record.getMessage()
    ]
    assert [level for level, _ in said] == ["INFO", "ERROR"]
    assert "page 3" in said[1][1]


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Look until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()
