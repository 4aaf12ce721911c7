"""The Grafana dashboard of jaxllm. `python -m server.dashboard` writes it.

Queries have `$model_name` and Grafana's `$__rate_interval`, as vLLM's stock dashboard does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent / "monitoring" / "jaxllm.json"
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 8, 8, 3
SELECTOR = '{model_name="$model_name"}'
RANGE = "[$__rate_interval]"


class Panel(NamedTuple):
    """One graph: its title, Grafana's name of its unit, and its queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def value(metric: str) -> str:
    """The gauge itself."""
    return f"{metric}{SELECTOR}"


def rate(metric: str) -> str:
    """A counter's growth a second."""
    return f"rate({metric}{SELECTOR}{RANGE})"


def quantiles(metric: str) -> dict[str, str]:
    """The median, the 99th percentile and the mean of a histogram."""
    buckets = f"sum by(le) (rate({metric}_bucket{SELECTOR}{RANGE}))"
    found = {
        f"p{share * 100:.0f}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.99)
    }
    return found | {"mean": f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"}


def grown(metric: str, label: str) -> dict[str, str]:
    """How much a counter grew, by one of its labels."""
    return {f"{{{{{label}}}}}": f"sum by({label}) (increase({metric}{SELECTOR}{RANGE}))"}


PANELS = (
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
    Panel("Time of a request", "s", quantiles("vllm:e2e_request_latency_seconds")),
    Panel(
        "Tokens a second",
        "none",
        {
            "prompt": rate("vllm:prompt_tokens_total"),
            "output": rate("vllm:generation_tokens_total"),
        },
    ),
    Panel(
        "Requests",
        "none",
        {
            "running": value("vllm:num_requests_running"),
            "waiting": value("vllm:num_requests_waiting"),
        },
    ),
    Panel("Waiting for a first step", "s", quantiles("vllm:request_queue_time_seconds")),
    Panel(
        "KV pages in use",
        "percentunit",
        {
            "device": value("vllm:kv_cache_usage_perc"),
            "host": value("jaxllm:host_cache_usage"),
        },
    ),
    Panel(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        {
            "share": f"{rate('vllm:prefix_cache_hits_total')} / "
            f"{rate('vllm:prefix_cache_queries_total')}"
        },
    ),
    Panel(
        "Preempted, and pages moved, a second",
        "none",
        {
            "preemptions": rate("vllm:num_preemptions_total"),
            "pages saved": rate("jaxllm:pages_saved_total"),
            "pages loaded": rate("jaxllm:pages_loaded_total"),
        },
    ),
    Panel("Finished, by reason", "none", grown("vllm:request_success_total", "finished_reason")),
    Panel("Not admitted, by reason", "none", grown("vllm:admission_rejections_total", "reason")),
    Panel(
        "Should stay 0",
        "none",
        {
            "compiles after warm-up": value("jaxllm:compiles_after_warmup_total"),
            "failed steps": value("jaxllm:engine_step_failures_total"),
            "restarts": value("jaxllm:engine_restarts_total"),
            "failed checks": value("jaxllm:self_check_failures_total"),
        },
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "jaxllm",
        "uid": "jaxllm",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [_source(), _model()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def _source() -> dict[str, Any]:
    return {
        "name": "DS_PROMETHEUS",
        "label": "data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _model() -> dict[str, Any]:
    return {
        "name": "model_name",
        "label": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": {
            "query": "label_values(vllm:num_requests_running, model_name)",
            "refId": "models",
        },
        "refresh": 2,
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {
            "x": column * PANEL_WIDTH,
            "y": row * PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "h": PANEL_HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": name,
            }
            for number, (name, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
    print(f"wrote {FILE}")
