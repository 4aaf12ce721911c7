"""One server, several models: a request reaches its own, and one that fails leaves the others."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.server.command_line.flags import parser
from jaxllm.server.command_line.options import parse_models
from jaxllm.server.command_line.server_flags import SERVER_WIDE
from tests.server.processes import Process, await_gone

FIRST_PORT: dict[str, Any] = {"enable_kv_cache_events": True}
SECOND = {"model": "b", "kv-events-config": FIRST_PORT | {"endpoint": "tcp://127.0.0.1:5558"}}
EVENTS = ("--kv-events-config", json.dumps(FIRST_PORT))
REFUSED = -7  # the fake engine's limit that it cannot be loaded with
QUESTION = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}


def config(tmp: pathlib.Path, **options: Any) -> pathlib.Path:
    """A file of options."""
    path = tmp / "config.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@pytest.fixture(scope="module")
def two(model_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    tmp = tmp_path_factory.mktemp("two")
    models = [
        {"model": str(model_dir), "served_model_name": ["m", "first"]},
        {
            "model": str(model_dir),
            "served_model_name": ["second"],
            "max_model_len": 64,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "endpoint": "ipc:///tmp/seconds-events",
            },
        },
    ]
    path = config(tmp, models=models, max_engine_restarts=0, admin_key="boss")
    process = Process(model_dir, tmp, config=path)
    try:
        yield process.up()
    finally:
        process.close()


def asked(process: Process, path: str, body: Any = None) -> tuple[int, Any]:
    status, text = process.get(path, body)
    return status, json.loads(text)


def told(process: Process, command: str, model: str) -> None:
    """The operator's command to a model's engine is carried out."""
    url = f"http://127.0.0.1:{process.port}{command}?model={model}"
    reply = httpx.post(url, headers={"authorization": "Bearer boss"}, timeout=60)
    assert reply.status_code == 200, reply.text


def test_requests_reach_the_model_that_they_name(two: Process) -> None:
    _, listed = asked(two, "/v1/models")
    lengths = {card["id"]: card["max_model_len"] for card in listed["data"]}
    assert list(lengths) == ["m", "first", "second"]
    assert lengths["second"] == 64 != lengths["first"]
    assert asked(two, "/v1/models/second")[1]["max_model_len"] == 64
    for name in lengths:
        status, reply = asked(two, "/v1/completions", QUESTION | {"model": name})
        assert (status, reply["model"]) == (200, name)
    long = QUESTION | {"prompt": [1] * 70}
    assert asked(two, "/v1/completions", long | {"model": "first"})[0] == 200
    assert asked(two, "/v1/completions", long | {"model": "second"})[0] == 400
    assert asked(two, "/server_info?model=second")[1]["max_model_len"] == 64


def test_what_is_asked_of_one_model_is_answered_by_it(two: Process) -> None:
    assert asked(two, "/kv_event_sources?model=m") == (200, [])
    status, (source,) = asked(two, "/kv_event_sources?model=second")
    assert (status, source["endpoint"]) == (200, "ipc:///tmp/seconds-events")
    for path in ("/kv_event_sources", "/is_sleeping", "/server_info"):
        assert asked(two, path)[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_request_must_name_a_model_that_is_served(two: Process, path: str) -> None:
    status, reply = asked(two, path, QUESTION)
    assert status == 400
    assert "m, first, second" in reply["error"]["message"]
    status, reply = asked(two, path, QUESTION | {"model": "third"})
    assert status == 404
    assert "m, first, second" in reply["error"]["message"]
    assert asked(two, path, QUESTION | {"model": 3})[0] == 400


def test_a_model_that_is_not_served_is_not_found_among_all_that_are(two: Process) -> None:
    status, reply = asked(two, "/v1/models/none")
    assert status == 404
    assert "serves m, first, second" in reply["error"]["message"]


def test_what_is_unknown_to_all_models_is_not_found(two: Process) -> None:
    for path in ("/v1/responses/resp_nothing", "/nothing", "/v1/models/nothing"):
        assert asked(two, path)[0] == 404


def test_metrics_name_each_family_once_and_both_models(two: Process) -> None:
    families = list(text_string_to_metric_families(two.get("/metrics")[1].decode()))
    assert max(Counter(family.name for family in families).values()) == 1
    for family in families:
        assert {sample.labels["model_name"] for sample in family.samples} == {"m", "second"}


def test_models_take_turns_asleep(two: Process) -> None:
    for asleep, awake in (("m", "second"), ("second", "m")):
        told(two, "/sleep", asleep)
        for name, sleeps in ((asleep, True), (awake, False)):
            assert asked(two, f"/is_sleeping?model={name}")[1] == {"is_sleeping": sleeps}
        status, reply = asked(two, "/v1/completions", QUESTION | {"model": asleep})
        assert (status, reply["error"]["code"]) == (503, "sleeping")
        assert asked(two, "/v1/completions", QUESTION | {"model": awake})[0] == 200
        status, ready = asked(two, "/ready")
        assert (status, ready["models"]) == (200, {asleep: "sleeping", awake: "ready"})
        told(two, "/wake_up", asleep)
        assert asked(two, "/v1/completions", QUESTION | {"model": asleep})[0] == 200


def test_a_model_may_begin_asleep_before_the_next_is_loaded(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """So each of two may have most of one card."""
    models = [
        {"model": str(model_dir), "served_model_name": ["early"], "start_asleep": True},
        {"model": str(model_dir), "served_model_name": ["late"]},
    ]
    path = config(tmp_path, models=models, admin_key="boss")
    process = Process(model_dir, tmp_path, config=path)
    try:
        process.up()
        slept = process.log.index("early sleeps until POST /wake_up")
        assert slept < process.log.rindex("loading the model in engine process")
        assert asked(process, "/v1/completions", QUESTION | {"model": "early"})[0] == 503
        told(process, "/sleep", "late")
        told(process, "/wake_up", "early")
        assert asked(process, "/v1/completions", QUESTION | {"model": "early"})[0] == 200
        assert asked(process, "/v1/completions", QUESTION | {"model": "late"})[0] == 503
    finally:
        process.close()


def test_a_model_that_fails_for_good_leaves_the_other_to_serve(two: Process) -> None:
    # The last test of this server
    told(two, "/sleep", "m")  # also what wakes up when the other one has gone
    assert asked(two, "/health")[1]["models"].keys() == {"m", "second"}
    os.kill(two.engine, signal.SIGKILL)  # of the second model: it wrote its number last
    await_gone(two.engine)
    two.says("the engine is not restarted again")
    told(two, "/wake_up", "m")
    assert asked(two, "/v1/completions", QUESTION | {"model": "second"})[0] == 503
    assert asked(two, "/v1/completions", QUESTION | {"model": "m"})[0] == 200
    status, reply = asked(two, "/health")
    assert (status, reply["status"]) == (200, "ok")
    assert {name: each["status"] for name, each in reply["models"].items()} == {
        "m": "ok",
        "second": "dead",
    }
    assert asked(two, "/ready")[1]["models"] == {"m": "ready", "second": "dead"}
    two.process.send_signal(signal.SIGTERM)
    assert two.ended() == 1  # one engine was lost


@pytest.mark.parametrize("broken", [0, 1])
def test_a_model_that_cannot_be_loaded_leaves_the_other_to_serve(
    broken: int, model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    models: list[dict[str, Any]] = [
        {"model": str(model_dir), "served_model_name": [name]} for name in ("m", "second")
    ]
    models[broken]["max_model_len"] = REFUSED
    process = Process(model_dir, tmp_path, config=config(tmp_path, models=models)).up()
    try:
        good, bad = ("m", "second") if broken else ("second", "m")
        process.says(f"{bad} is not served: --max-model-len must be at least 1, got {REFUSED}")
        assert [card["id"] for card in asked(process, "/v1/models")[1]["data"]] == [good]
        assert asked(process, "/v1/completions", QUESTION | {"model": good})[0] == 200
        status, reply = asked(process, "/v1/completions", QUESTION | {"model": bad})
        assert (status, reply["error"]["code"]) == (503, "model_not_loaded")
        assert asked(process, "/v1/completions", QUESTION)[0] == 400  # which one is meant?
        assert asked(process, "/server_info")[0] == 400
        status, reply = asked(process, "/health")
        found = {name: each["status"] for name, each in reply["models"].items()}
        assert (status, found) == (200, {good: "ok", bad: "dead"})
        assert asked(process, "/ready")[1]["models"] == {good: "ready", bad: "dead"}
        process.process.send_signal(signal.SIGTERM)  # which is counted, not fatal
        assert process.ended() == 1
    finally:
        process.close()


def test_a_server_none_of_whose_models_can_be_loaded_ends(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    models = [
        {"model": str(model_dir), "served_model_name": [name], "max_model_len": REFUSED}
        for name in ("m", "second")
    ]
    process = Process(model_dir, tmp_path, config=config(tmp_path, models=models))
    try:
        assert process.ended() != 0
        process.says("m is not served")
        process.says(f"error: --max-model-len must be at least 1, got {REFUSED}")
    finally:
        process.close()


def test_models_share_a_device_unless_something_else_is_said(tmp_path: pathlib.Path) -> None:
    def shares(argv: list[str]) -> list[float]:
        return [each.config.gpu_memory_utilization for each in parse_models(argv, {})]

    assert shares(["--model", "a", "--model=b"]) == [0.45, 0.45]
    assert shares(["--model", "a"]) == shares(["a"]) == [0.9]
    assert shares(["--model", "a", "--model", "b", "--gpu-memory-utilization", "0.3"]) == [0.3, 0.3]
    own = [{"model": "a", "gpu_memory_utilization": 0.6}, {"model": "b"}]
    assert shares(["--config", str(config(tmp_path, models=own))]) == [0.6, 0.45]
    apart = [{"model": "a", "visible_devices": 0}, {"model": "b", "visible_devices": 1}]
    assert shares(["--config", str(config(tmp_path, models=apart))]) == [0.9, 0.9]


def test_models_publish_kv_events_each_at_an_address_of_its_own(tmp_path: pathlib.Path) -> None:
    named = config(tmp_path, models=[{"model": "a"}, SECOND], kv_events_config=FIRST_PORT)
    both = [options.settings.kv_events for options in parse_models(["--config", str(named)], {})]
    assert [events.bound for events in both if events is not None] == [
        ["tcp://127.0.0.1:5557"],
        ["tcp://127.0.0.1:5558"],
    ]


@pytest.mark.parametrize(
    ("argv", "options", "says"),
    [
        (["--model", "a", "--model", "a"], None, "two models would be served as a"),
        (["--model", "a", "--model", "b", "--served-model-name", "x"], None, "served as x"),
        (["--model", "a"], {"models": [{"model": "b"}]}, "leave --model out"),
        ([], {"models": [{"dtype": "auto"}]}, "models[0] has no model"),
        ([], {"models": []}, "models must be a list"),
        ([], {"models": [{"model": "b", "port_": 1}]}, "models[0]: 'port_' is no option"),
        ([], {"model": "a", "models": [{"model": "b"}]}, "both model and models"),
        ([], {"models": [{"model": "a"}, {"model": "b", "api-key": "k"}]}, "models[1]: api_key is"),
        (["--model", "a", "--model", "b", *EVENTS], None, "KV events at tcp://127.0.0.1:5557"),
        (
            ["--data-parallel-size", "2"],
            {"models": [{"model": "a", "kv-events-config": FIRST_PORT}, SECOND]},
            "KV events at tcp://127.0.0.1:5558",
        ),
        ([], {"models": [{"model": "a", "port": 9001}]}, "port is an option of the whole server"),
    ],
)
def test_what_does_not_name_models_clearly_is_one_line(
    argv: list[str],
    options: dict[str, Any] | None,
    says: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = [] if options is None else ["--config", str(config(tmp_path, **options))]
    with pytest.raises(SystemExit) as ended:
        parse_models([*argv, *file], {})
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_every_option_of_the_whole_server_is_an_option() -> None:
    assert {action.dest for action in parser()._actions} >= SERVER_WIDE
