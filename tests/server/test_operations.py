"""The files in server/ that run jaxllm for others fit the server that they run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.server.command_line.options import parse, parse_models
from server import check_dashboard, dashboard, smoke
from tests.server.harness import Running
from tests.server.test_observability import DASHBOARD
from tests.server.transport.certificates import authority

ROOT = Path(__file__).parents[2] / "server"
MANIFESTS = sorted((ROOT / "kubernetes").glob("*.yaml"))
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))
COMPOSE = ROOT / "container" / "compose.yaml"
KUBERNETES_GRACE = 30  # seconds until it kills a pod, unless told otherwise
# The forms of vLLM's stock dashboard: percentiles and means of histograms, rates, gauges, growth
STOCK = [
    *(
        f"histogram_quantile(0.99, sum by(le) (rate({name}"
        '{model_name="$model_name"}[$__rate_interval])))'
        for name in DASHBOARD
        if name.endswith("_bucket")
    ),
    *(
        f'rate({name}{{model_name="$model_name"}}[$__rate_interval])'
        for name in DASHBOARD
        if name.endswith(("_total", "_sum"))
    ),
    *(
        f'{name}{{model_name="$model_name"}}'
        for name in DASHBOARD
        if not name.endswith(("_total", "_sum", "_bucket"))
    ),
    "sum by(finished_reason) "
    '(increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
]


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container of a manifest."""
    if isinstance(value, dict):
        yield from value.get("containers", ())
        for item in value.values():
            yield from containers(item)
    elif isinstance(value, list):
        for item in value:
            yield from containers(item)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The server's arguments wherever one is started."""
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            for container in containers(document):
                yield path.name, container["args"]
    yield COMPOSE.name, yaml.safe_load(COMPOSE.read_text())["services"]["jaxllm"]["command"]
    unit = (ROOT / "systemd" / "jaxllm.service").read_text()
    yield "jaxllm.service", shlex.split(re.search(r"-m jaxllm\.server (.*)", unit)[1])
    image = (ROOT / "container" / "Containerfile").read_text()
    yield "Containerfile", json.loads(re.search(r"^CMD (\[\"--.*)$", image, re.M)[1])


@pytest.mark.parametrize(("file", "arguments"), list(commands()))
def test_every_started_server_has_flags_that_exist(file: str, arguments: list[str]) -> None:
    assert parse(arguments, {}).config.model, file


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_is_a_file_of_options(path: Path, tmp_path: Path) -> None:
    """With the files that it names, such as keys, put elsewhere."""
    pair = authority(tmp_path)
    pair.cert.rename(tmp_path / "tls.crt")
    pair.key.rename(tmp_path / "tls.key")
    for name in ("keys", "admin-keys"):
        (tmp_path / name).write_text(f"a key of {name}\n")
    file = tmp_path / path.name
    file.write_text(path.read_text().replace("/etc/jaxllm", str(tmp_path)))
    found = parse_models(["--config", str(file)], {})
    assert len(found) == (2 if path.stem in ("two-models", "turns") else 1)
    awake = [options.config for options in found if not options.start_asleep]
    assert 0 < sum(config.gpu_memory_utilization for config in awake) <= 0.9
    assert path.read_text().startswith("# "), "says what it is for"
    assert f"[{path.stem}](profiles/{path.name})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_probes_ask_routes_that_answer(path: Path, fresh: Running) -> None:
    probes = [
        container[f"{kind}Probe"]["httpGet"]["path"]
        for document in yaml.safe_load_all(path.read_text())
        for container in containers(document)
        if "ports" in container  # others serve nothing
        for kind in ("startup", "readiness", "liveness")
    ]
    assert sorted(set(probes)) == ["/health", "/ready"]
    assert {fresh.get(probe).status for probe in probes} == {200}


def test_llm_ds_replicas_publish_what_its_router_subscribes_to() -> None:
    """Its guide for routing by cached prefixes: a socket of each pod's own, a topic of `kv`, the
    pod's address and the served model, and pages of 64 tokens."""
    manifest = ROOT / "kubernetes" / "llm-d.yaml"
    deployment = next(iter(yaml.safe_load_all(manifest.read_text())))
    (container,) = containers(deployment)
    options = parse(container["args"], {})
    events = options.config.kv_events_config
    assert events is not None and events["enable_kv_cache_events"] is True
    settings = KVEventSettings.read(events)
    assert settings is not None
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.endpoint == f"tcp://*:{ports['kv-events']}" == "tcp://*:5556"
    assert settings.replay_endpoint == f"tcp://*:{ports['kv-replay']}" == "tcp://*:5559"
    kind, pod, model = settings.topic.split("@")
    assert (kind, pod) == ("kv", f"$(POD_IP):{ports['http']}")
    assert model in options.settings.served
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in (
        container["env"]
    )
    assert options.config.block_size == 64
    extra = re.search(r"EXTRAS=\S*", manifest.read_text())[0]  # type: ignore[index]
    assert "kv-events" in extra


def test_kserve_starts_a_server_under_the_name_of_its_service() -> None:
    """As its controller does: it takes the container of that name, fills in the service's name,
    puts the model below /mnt/models, sends requests to port 8080, and says nothing of stopping."""
    manifest = (ROOT / "kubernetes" / "kserve.yaml").read_text()
    runtime, service = yaml.safe_load_all(manifest)
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    (container,) = containers(runtime)
    assert container["name"] == "kserve-container"
    name = service["metadata"]["name"]
    options = parse([each.replace("{{.Name}}", name) for each in container["args"]], {})
    assert (options.config.model, options.settings.served) == ("/mnt/models", (name,))
    scraped = runtime["spec"]["annotations"]
    ports = {options.port, int(scraped["prometheus.kserve.io/port"])}
    assert ports == {each["containerPort"] for each in container["ports"]} == {8080}
    assert options.shutdown_timeout + 5 <= KUBERNETES_GRACE


def test_whoever_stops_a_server_waits_longer_than_it_drains() -> None:
    drain = parse([], {}).shutdown_timeout
    graces = [
        document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for path in MANIFESTS
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] == "Deployment"
    ]
    unit = (ROOT / "systemd" / "jaxllm.service").read_text()
    graces.append(int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]))
    compose = yaml.safe_load(COMPOSE.read_text())["services"]["jaxllm"]["stop_grace_period"]
    graces.append(int(compose.removesuffix("s")))
    assert min(graces) >= drain + 5, graces


def test_the_hosts_of_a_leader_worker_set_are_one_group() -> None:
    text = (ROOT / "kubernetes" / "leaderworkerset.yaml").read_text()
    group = next(iter(yaml.safe_load_all(text)))["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    templates = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    for rank, spec in enumerate(templates):
        variables = {
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(rank),
            "LWS_LEADER_ADDRESS": "jaxllm-0.jaxllm.default",
        }
        (container,) = spec["containers"]
        options = parse(container["args"], variables)
        config = options.config
        assert (config.nnodes, config.node_rank) == (group["size"], rank)
        devices = container["resources"]["limits"]["nvidia.com/gpu"]
        assert config.tensor_parallel_size == group["size"] * devices
        folders = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(Path(config.group_key_file).parent) in folders
        assert spec["terminationGracePeriodSeconds"] >= options.shutdown_timeout + 5
    leader, worker = (spec["terminationGracePeriodSeconds"] for spec in templates)
    assert worker > leader  # whose requests need it
    first, second = (spec["containers"][0] for spec in templates)
    assert all(first[name] == value for name, value in second.items())


def test_files_that_compose_mounts_are_there() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    volumes = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    paths = [COMPOSE.parent / volume for volume in volumes if volume.startswith(".")]
    assert len(paths) == 4
    assert all(path.exists() for path in paths)
    assert (COMPOSE.parent / services["jaxllm"]["build"]["context"] / "pyproject.toml").exists()


def test_the_dashboard_lies_as_it_is_written() -> None:
    assert json.loads(dashboard.FILE.read_text()) == dashboard.dashboard()


def test_the_dashboard_asks_for_metrics_that_the_server_has(fresh: Running) -> None:
    exported = {line.split("{")[0] for line in fresh.get("/metrics").body.decode().splitlines()}
    asked = {
        name
        for _, query in check_dashboard.queries(dashboard.dashboard())
        for name in check_dashboard.METRIC.findall(query)
    }
    assert len(asked) > 20
    assert asked - exported == set()


def test_alerts_ask_for_metrics_that_the_server_has(fresh: Running) -> None:
    """Each rule says what is wrong and what to do, and Prometheus finds the file that has them."""
    monitoring = ROOT / "monitoring"
    (file,) = yaml.safe_load((monitoring / "prometheus.yaml").read_text())["rule_files"]
    (group,) = yaml.safe_load((monitoring / file).read_text())["groups"]
    metrics = fresh.get("/metrics").body.decode()
    declared = set(re.findall(r"^# TYPE (\S+) ", metrics, re.M))
    samples = {line.split("{")[0] for line in metrics.splitlines()}
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 5
    for rule in group["rules"]:
        assert set(check_dashboard.METRIC.findall(rule["expr"])) <= declared | samples
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_the_smoke_test_passes_on_a_server_and_names_what_is_wrong(
    fresh: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["smoke", fresh.url])
    assert smoke.main() == 0
    assert capsys.readouterr().out.count("\n") == len(smoke.CHECKS)
    monkeypatch.setitem(smoke.CHECKS, "/v1/models", lambda server: smoke.stream(Broken(server.url)))
    assert smoke.main() == 1
    assert "unexpected answer" in capsys.readouterr().err


class Broken(smoke.Server):
    """A server whose streams break off."""

    def get(self, path: str, body: Any = None) -> tuple[int, str]:
        status, text = super().get(path, body)
        return status, text.replace("data: [DONE]", "") if body else text


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian's package)"
)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "vllm"])
def test_prometheus_answers_every_query_of_the_dashboards(
    fresh: Running, tmp_path: Path, stock: bool
) -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(ROOT / "monitoring" / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{fresh.port}"]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    try:
        requests = 'increase(vllm:request_success_total{finished_reason="length"}[1m])'
        deadline = time.monotonic() + 60
        while not _positive(url, requests):
            body = {"model": "alias", "prompt": "abcd", "max_tokens": 4}
            assert fresh.post("/v1/completions", body).status == 200
            assert time.monotonic() < deadline
        panels = [{"title": query, "targets": [{"expr": query}]} for query in STOCK]
        shown = {"panels": panels} if stock else dashboard.dashboard()
        assert check_dashboard.unanswered(shown, url, "fake") == []
        broken = {"panels": [{"title": "x", "targets": [{"expr": "rate(vllm:nothing_total[1m])"}]}]}
        assert len(check_dashboard.unanswered(broken, url, "fake")) == 1
    finally:
        process.terminate()
        process.wait(30)


def _positive(url: str, query: str) -> bool:
    try:
        found = check_dashboard.ask(url, "query", query=query)["result"]
    except OSError:
        return False  # Prometheus still starts
    return any(float(series["value"][1]) > 0 for series in found)
