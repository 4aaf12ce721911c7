"""What a conversation may cost, and what it cannot do to others."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from jaxllm.chat_template import TemplateInput
from jaxllm.server.errors import OVERFLOW, ApiError, bad_request
from jaxllm.server.rendering import renders as module
from jaxllm.server.rendering.renders import RenderProcess, Renders, encoded
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running
from tests.server.processes import await_gone

TEMPLATE = """{%- set what = messages[0].content -%}
{%- if what == 'hang' -%}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor -%}
{%- elif what == 'long' -%}{%- for a in range(999) %}{{ 'x' * 999 }}{% endfor -%}
{%- elif what == 'bomb' -%}{%- for a in range(99999) %}{{ 'x' * 99999 }}{% endfor -%}
{%- elif what == 'refuse' -%}{{ raise_exception('not this') }}
{%- else -%}{{ what }}{%- endif -%}"""
SECONDS = (0.05, 0.3)


@pytest.fixture(scope="module")
def hostile(model_dir: pathlib.Path) -> Tokenizer:
    """A tokenizer whose template does as a message says."""
    return Tokenizer.load(model_dir, TEMPLATE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that are soon spent."""
    monkeypatch.setattr(module, "BUDGETS", SECONDS)


@asynccontextmanager
async def rendering(tokenizer: Tokenizer) -> AsyncIterator[Renders]:
    renders = Renders(tokenizer.template_facts())
    try:
        yield renders
    finally:
        await renders.shut_down()


def text_of(renders: Renders, content: str, max_chars: int = 1 << 16) -> Awaitable[str]:
    arguments = TemplateInput(messages=[{"role": "user", "content": content}]).arguments(TEMPLATE)
    return renders.text_of(arguments, True, max_chars, too_long)


def too_long(chars: int) -> ApiError:
    return bad_request(f"{chars} characters", "messages", OVERFLOW)


async def refused(renders: Renders, content: str) -> ApiError:
    with pytest.raises(ApiError) as error:
        await text_of(renders, content)
    assert error.value.param == "messages" or error.value.status == 503
    return error.value


def process_of(renders: Renders, lane: int) -> psutil.Process:
    pid = renders.processes[lane].pid
    assert pid is not None
    return psutil.Process(pid)


async def met(condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds; its value."""
    async with asyncio.timeout(60):
        while not (found := condition()):
            await asyncio.sleep(0)
    return found


@pytest.mark.usefixtures("quick")
def test_each_limit_is_an_error_of_the_sender_and_the_next_conversation_is_rendered(
    hostile: Tokenizer,
) -> None:
    async def main() -> None:
        async with rendering(hostile) as renders:
            assert await text_of(renders, "hello") == "hello"
            first = process_of(renders, 0)
            for content, status, words in (
                ("hang", 400, "more than 0.3 s of processor time for the conversation; shorten"),
                ("long", 400, "998001 characters"),
                ("bomb", 400, "more than 2 GiB of memory for the conversation; shorten"),
                ("refuse", 400, "the chat template refused the conversation: not this"),
            ):
                error = await refused(renders, content)
                assert error.status == status and words in error.message
                code = OVERFLOW if content == "long" else "chat_template_error"
                assert error.code == code
                assert await text_of(renders, content * 2) == content * 2
            assert process_of(renders, 0) == first, "only its forks were replaced"
            exact = "y" * 100
            assert await text_of(renders, exact, 100) == exact
            with pytest.raises(ApiError, match="101 characters"):
                await text_of(renders, exact + "y", 100)

    asyncio.run(main())


def test_quick_conversations_do_not_wait_for_slow_ones(
    hostile: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUDGETS", (0.05, 60.0))

    async def main() -> None:
        async with rendering(hostile) as renders:
            slow = [asyncio.ensure_future(text_of(renders, "hang")) for _ in range(2)]
            await met(lambda: renders.waiting == [0, 2])
            for n in range(20):
                assert await text_of(renders, f"{n}") == f"{n}"
            assert not any(one.done() for one in slow)
            slow[1].cancel()
            await met(lambda: renders.waiting == [0, 1])
        with pytest.raises(ApiError) as error:
            await slow[0]
        assert (error.value.status, error.value.code) == (503, "template_renderer_lost")
        assert "closed" in error.value.message

    asyncio.run(main())


def test_a_full_queue_is_a_503(hostile: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGETS", (0.05, 60.0))
    monkeypatch.setattr(module, "MAX_WAITING", (8, 1))

    async def main() -> None:
        async with rendering(hostile) as renders:
            slow = asyncio.ensure_future(text_of(renders, "hang"))
            await met(lambda: renders.waiting == [0, 1])
            error = await refused(renders, "hang")
            assert (error.status, error.code) == (503, "render_queue_full")
            assert "1 conversations wait" in error.message and error.headers["retry-after"]
            assert await text_of(renders, "hello") == "hello"
            slow.cancel()

    asyncio.run(main())


def test_bytes_that_wait_are_bounded_and_one_conversation_may_be_larger(
    hostile: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUDGETS", (60.0,))
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", (1000,))

    async def main() -> None:
        async with rendering(hostile) as renders:
            long = "y" * 2000
            assert await text_of(renders, long) == long
            slow = asyncio.ensure_future(text_of(renders, "hang"))
            await met(lambda: renders.waiting == [1])
            error = await refused(renders, long)
            assert (error.status, error.code) == (503, "render_queue_full")
            assert "the limits are 4096 and 1000" in error.message
            slow.cancel()
            await met(lambda: renders.waiting_bytes == [0])

    asyncio.run(main())


@pytest.mark.slow
def test_who_is_killed_from_outside_is_replaced(hostile: Tokenizer) -> None:
    async def main() -> None:
        async with rendering(hostile) as renders:
            assert await text_of(renders, "hello") == "hello"
            first = process_of(renders, 0)
            first.children()[0].kill()  # as the kernel does on a machine without memory
            psutil.wait_procs([first], 20)
            assert await text_of(renders, "hello") == "hello"
            second = process_of(renders, 0)
            second.kill()
            psutil.wait_procs([second], 20)
            assert await text_of(renders, "hello") == "hello"
            assert len({first.pid, second.pid, process_of(renders, 0).pid}) == 3

    asyncio.run(main())


def test_a_kill_in_the_middle_of_a_conversation_is_a_503(
    hostile: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUDGETS", (60.0,))

    async def main() -> None:
        async with rendering(hostile) as renders:
            assert await text_of(renders, "hello") == "hello"
            fork = process_of(renders, 0).children()[0]
            before = fork.cpu_times().user
            slow = asyncio.ensure_future(text_of(renders, "hang"))
            await met(lambda: fork.cpu_times().user > before + 0.05)
            fork.kill()
            with pytest.raises(ApiError) as error:
                await slow
            assert (error.value.status, error.value.code) == (503, "template_renderer_lost")
            assert "ended meanwhile; try again" in error.value.message
            assert await text_of(renders, "hello") == "hello"

    asyncio.run(main())


def test_a_renderer_inherits_no_socket_and_ends_with_its_parents_pipe(hostile: Tokenizer) -> None:
    own = RenderProcess(hostile.template_facts(), 1.0)
    job = {"arguments": arguments("hello"), "sanitize": True, "max_chars": 99}
    assert own.reply_to(encoded(job)) == {"text": "hello"}
    assert own._process is not None and own._process.stdin is not None
    process = psutil.Process(own._process.pid)
    (fork,) = process.children()
    for one in (process, fork):
        files = pathlib.Path(f"/proc/{one.pid}/fd")
        names = {int(file.name): os.readlink(file) for file in files.iterdir()}
        assert names[0].startswith("pipe:") and names[1].startswith("pipe:")
        assert not [name for name in names.values() if name.startswith("socket:")]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            one.send_signal(number)  # as service managers send to every process
    assert own.reply_to(encoded(job)) == {"text": "hello"}
    own._process.stdin.close()
    psutil.wait_procs([process], 20)
    assert not fork.is_running()
    own.end_process()


def arguments(content: str) -> dict[str, Any]:
    return TemplateInput(messages=[{"role": "user", "content": content}]).arguments(TEMPLATE)


@pytest.fixture
def hanging(hostile: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose template may hang for a minute of processor time."""
    monkeypatch.setattr(module, "BUDGETS", (0.05, 60.0))
    with Running(hostile) as running:
        yield running


def chat(content: str) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}]}


def test_two_chats_that_hang_hold_up_nobody(hanging: Running) -> None:
    path = "/v1/chat/completions"
    with hanging.begin(path, chat("hang")) as one, hanging.begin("/tokenize", chat("hang")) as two:
        renders = hanging.server_state.renders
        assert renders is not None
        while renders.waiting != [0, 2]:
            assert hanging.get("/version").status == 200
        for n in range(5):
            text = f"text {n}"
            done = hanging.post("/v1/completions", {"model": "fake", "prompt": text})
            assert done.json()["choices"][0]["text"] == text
            assert hanging.post(path, chat(text)).json()["choices"][0]["message"]["content"] == text
            assert hanging.post("/tokenize", {"prompt": text}).json()["count"] == len(text)
        assert not one.readable() and not two.readable()
    while renders.waiting != [0, 1]:  # the chat goes with its client
        assert hanging.get("/version").status == 200


def renderers(server: psutil.Process) -> list[psutil.Process]:
    """The forks that render for a server process."""
    lanes = [one for one in server.children() if "rendering" in " ".join(one.cmdline())]
    return [fork for lane in lanes for fork in lane.children()]


@pytest.mark.slow
def test_a_server_stops_while_its_template_hangs(launch: Any) -> None:
    server = launch("--chat-template", TEMPLATE, "--shutdown-timeout", "0.1", tokenizer=True).up()
    process = psutil.Process(server.process.pid)
    with server.begin_chat("hang") as first, server.begin_chat("hang") as second:
        while len(forks := renderers(process)) < 2:  # it hangs in the second lane
            assert not first.readable()
        server.process.send_signal(signal.SIGTERM)
        assert {first.status(), second.status()} == {503}
    assert server.ended() == 0
    for fork in forks:
        await_gone(fork.pid)


def test_renderers_do_not_outlive_a_killed_server(launch: Any) -> None:
    server = launch("--chat-template", TEMPLATE, tokenizer=True).up()
    process = psutil.Process(server.process.pid)
    while not (forks := renderers(process)):
        assert server.process.poll() is None
    server.process.kill()
    for fork in forks:
        await_gone(fork.pid)
