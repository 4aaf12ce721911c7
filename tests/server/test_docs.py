"""docs/server.md says what is."""

from __future__ import annotations

import pathlib
import re

from starlette.routing import Route

from jaxllm.server.app import routes
from jaxllm.server.command_line.flags import parser
from jaxllm.server.middleware.auth import is_open
from tests.server.harness import Running


def test_the_page_lists_every_route_and_whether_it_needs_a_key(
    repo: pathlib.Path, fresh: Running
) -> None:
    listed = {}
    for line in (repo / "docs" / "server.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[2] in ("yes", "no"):
            listed |= dict.fromkeys(
                re.findall(r"`(GET|POST|DELETE) ([^`]+)`", cells[1]), cells[2] == "yes"
            )
    actual = {}
    for route in routes(fresh.server_state).routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "")
        actual |= {
            (method, path): not is_open(path) for method in (route.methods or set()) - {"HEAD"}
        }
    assert listed == actual


def test_the_page_names_only_flags_and_metrics_that_exist(
    repo: pathlib.Path, fresh: Running
) -> None:
    text = (repo / "docs" / "server.md").read_text()
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    of_convert = {"--as-served"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags | {"--help"} | of_convert
    metrics = fresh.get("/metrics").body.decode()
    for name in re.findall(r"`((?:vllm|jaxllm):[a-z0-9_]+)`", text):
        assert name in metrics
