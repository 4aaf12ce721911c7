"""The page's files: open, unchangeable, cached by their contents."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from jaxllm.server.command_line.options import parse
from jaxllm.server.page.files import FOLDER, TYPES
from tests.server.harness import Running, with_settings

NAMES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    """A server that asks for a key, below a path."""
    with Running(None, with_settings(api_keys=("secret",)), root_path="/api") as running:
        yield running


def test_page_files_need_no_key_and_carry_a_strict_policy(locked: Running) -> None:
    for path in ("/", *(f"/page/{name}" for name in NAMES)):
        answer = locked.get(path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert locked.get("/v1/models").status == 401
    assert locked.get("/stats/stream").status == 401


def test_every_file_has_a_type_that_is_served(server: Running) -> None:
    for name in NAMES:
        suffix = name[name.rindex(".") :]
        assert server.get(f"/page/{name}").headers["content-type"] == TYPES[suffix]
        assert server.get(f"/page/{name}").body == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "/page/../files.py",
        "/page/%2e%2e/files.py",
        "/page/..%2ffiles.py",
        "/page/lib/../../files.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/..\\files.py",
        "/page/",
        "/page/lib",
        "/page/index.html%00",
    ],
)
def test_no_path_leads_to_another_file(server: Running, path: str) -> None:
    assert server.get(path).error["code"] == "not_found"


def test_a_file_that_the_browser_has_is_not_sent_again(server: Running) -> None:
    first = server.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = server.get("/page/app.js", **{"if-none-match": f'W/"x", {first.headers["etag"]}'})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert server.get("/page/app.js", **{"if-none-match": '"x"'}).status == 200
    assert server.get("/page/base.css").headers["etag"] != first.headers["etag"]


def test_head_is_answered_without_a_body_and_post_refused(server: Running) -> None:
    head = server.request("HEAD", "/")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) == len(server.get("/").body)
    assert server.post("/", {}).error["code"] == "method_not_allowed"


def test_without_the_page_its_paths_are_unknown() -> None:
    with Running(None, with_settings(page=False, api_keys=("secret",))) as running:
        for path in ("/", "/page/app.js"):
            assert running.get(path).error["code"] == "not_found"
    assert parse(["--model", "demo", "--no-page"], {}).settings.page is False
    assert parse(["--model", "demo"], {}).settings.page is True


def test_the_page_names_no_other_host_and_no_absolute_path() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text()
        hosts = set(re.findall(r"https?://[\w.-]+", text))
        assert hosts <= {"http://www.w3.org"}, name  # the name of SVG, which nobody loads
        assert not re.search(r"""(?:src|href|import|from)\s*=?\s*["']/""", text), name


def test_no_script_makes_html_of_a_string() -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    for name in NAMES:
        assert not re.search(banned, (FOLDER / name).read_text()), name


def test_files_are_small() -> None:
    assert sum((FOLDER / name).stat().st_size for name in NAMES) < 220_000
