"""Asks a Prometheus that scrapes a server every query of a Grafana dashboard, and names those that
it cannot answer.

    python -m server.check_dashboard DASHBOARD.json --prometheus http://localhost:9090 --model demo

Exits with 1 when a query fails or names a metric that nobody exports. Queries without a series yet
are named on stderr: some exist only after an event, such as a request that was not admitted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRIC = re.compile(r"\b(?:vllm|jaxllm):\w+")


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of every query, rows of panels included."""
    panels = list(dashboard["panels"])
    for panel in panels:
        panels += panel.get("panels", ())
        for target in panel.get("targets", ()):
            yield panel.get("title", "?"), target["expr"]


def filled(query: str, model: str, interval: str) -> str:
    """The query with Grafana's variables in their places."""
    for name, text in (
        ("model_name", model),
        ("__rate_interval", interval),
        ("__interval", interval),
    ):
        query = query.replace("${" + name + "}", text).replace("$" + name, text)
    return query


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """The data of one call of Prometheus' API. Raises OSError, for a bad query too."""
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)["data"]


def unanswered(
    dashboard: dict[str, Any], prometheus: str, model: str, interval: str = "1m"
) -> list[str]:
    """What is wrong with each query that fails or names a metric that nobody exports."""
    known = set(ask(prometheus, "label/__name__/values"))
    wrong = []
    for title, query in queries(dashboard):
        missing = sorted(set(METRIC.findall(query)) - known)
        try:
            found = ask(prometheus, "query", query=filled(query, model, interval))["result"]
        except OSError as error:
            wrong.append(f"{title}: {query}: {error}")
            continue
        if missing:
            wrong.append(f"{title}: {query}: no metric {', '.join(missing)}")
        elif not found:
            print(f"{title}: no series yet for {query}", file=sys.stderr)
    return wrong


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("dashboard", type=Path)
    arguments.add_argument("--prometheus", default="http://localhost:9090")
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--interval", default="1m", help="what $__rate_interval stands for")
    a = arguments.parse_args()
    dashboard = json.loads(a.dashboard.read_text())
    wrong = unanswered(dashboard, a.prometheus, a.model, a.interval)
    for line in wrong:
        print(line)
    count = sum(1 for _ in queries(dashboard))
    print(f"{count - len(wrong)} of {count} queries of {a.dashboard} are answered")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
