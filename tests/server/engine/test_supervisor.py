"""Engine processes that cannot be started, and what their deaths mean for requests and commands."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from jaxllm.commands import Profile, Sleep, UpdateWeights, WakeUp
from jaxllm.config import EngineConfig
from jaxllm.hosts.group import LOST_STATUS
from jaxllm.messages import EngineStats, GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.engine import supervisor as supervisors
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.connection import EngineDied, launch
from jaxllm.server.engine.group import EngineGroup
from jaxllm.server.engine.supervisor import EngineSupervisor
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Command,
    Frames,
    Inspect,
    Outputs,
    Ready,
    StepFailed,
    ToEngine,
    ToServer,
    encode,
)
from jaxllm.server.errors import ApiError
from tests.server.fake import RESOLVED

MISSING = ("/no/such/program",)
STATS = EngineStats(missing_programs=19)


class Engine:
    """The other end of a client's socket, played by the test; `client` is connected to it."""

    def __init__(self, client: EngineClient):
        self.client = client
        self._frames = Frames[ToEngine](ToEngine)
        self._got: list[ToEngine] = []

    async def start(self) -> None:
        ours, self._socket = socket.socketpair()
        self._socket.setblocking(False)
        connecting = asyncio.ensure_future(self.client.connect(ours))
        await self.next()
        await self.say(Ready(RESOLVED, STATS))
        await connecting
        assert self.client.stats == STATS

    async def next(self) -> ToEngine:
        while not self._got:
            data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            self._got += self._frames.feed(data)
        return self._got.pop(0)

    async def say(self, message: ToServer) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, encode(message))

    async def die(self) -> None:
        died = self.client.died
        self._socket.close()
        await died


def request(id: str) -> GenerateRequest:
    return GenerateRequest(id=id, prompt=Prompt([1]), params=SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "was killed, as the system does when memory is short"),
        (f"os._exit({LOST_STATUS})", "ended with its group of hosts; the log says why"),
    ],
    ids=["killed", "without its hosts"],
)
def test_a_process_that_ends_without_a_word_is_told_by_its_status(end: str, told: str) -> None:
    async def main() -> None:
        client = EngineClient(EngineConfig(model="fake"))
        command = (sys.executable, "-c", f"import os; {end}")
        with pytest.raises(EngineDied, match=f"the engine process {told}"):
            await EngineSupervisor(client, command, 0).start()

    asyncio.run(main())


def test_a_process_that_cannot_be_started_is_a_failed_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisors, "FIRST_DELAY", 0.0)

    async def main() -> None:
        client = EngineClient(EngineConfig(model="fake"))
        assert not await EngineSupervisor(client, MISSING, 2).restart()
        assert (client.restarting, client.alive, client.given_up) == (False, False, True)

    asyncio.run(main())
    assert caplog.text.count("cannot be started: No such file or directory") == 2
    assert "not restarted again" in caplog.text


def test_a_process_that_cannot_be_started_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    pair = socket.socketpair

    def recorded() -> tuple[socket.socket, socket.socket]:
        made.extend(pair())
        return made[0], made[1]

    monkeypatch.setattr(socket, "socketpair", recorded)
    with pytest.raises(EngineDied, match="No such file"):
        launch(MISSING)
    assert [each.fileno() for each in made] == [-1, -1]


def test_a_command_on_the_wire_when_the_engine_dies_is_a_server_error() -> None:
    async def main() -> None:
        engine = Engine(EngineClient(EngineConfig(model="fake")))
        await engine.start()
        command = asyncio.ensure_future(engine.client.run_command(Profile(True)))
        assert await engine.next() == Profile(True)
        inspection = engine.client.inspect()
        assert await engine.next() == Inspect()
        await engine.die()
        for answer in (command, inspection):
            with pytest.raises(ApiError, match="stopped working") as error:
                await answer
            assert error.value.status == 500
        with pytest.raises(ApiError, match="not running"):
            engine.client.inspect()
        await engine.start()  # the next process's answers are for its own commands
        command = asyncio.ensure_future(engine.client.run_command(Profile(False)))
        assert await engine.next() == Profile(False)
        await engine.say(Answered(None))
        await command
        await engine.die()

    asyncio.run(main())


def test_a_restarted_engine_takes_the_weights_that_the_one_before_had() -> None:
    async def main() -> None:
        engine = Engine(client := EngineClient(EngineConfig(model="fake")))
        await engine.start()
        update = asyncio.ensure_future(client.run_command(UpdateWeights("/new")))
        assert await engine.next() == UpdateWeights("/new")
        await engine.say(Answered(None))
        await update
        await engine.die()
        await engine.start()
        EngineGroup([client]).submit([request("after")])
        assert await engine.next() == UpdateWeights("/new")
        assert isinstance(await engine.next(), Add)
        await engine.say(Answered("no such directory"))
        assert "cannot take the weights of /new again" in (await client.died).reason
        assert (client.alive, client.in_flight) == (False, 0)
        await engine.die()

    asyncio.run(main())


def test_a_restarted_engine_sleeps_as_the_one_before_did_until_it_was_woken() -> None:
    async def main() -> None:
        engine = Engine(client := EngineClient(EngineConfig(model="fake")))

        async def told(command: Command) -> None:
            done = asyncio.ensure_future(client.run_command(command))
            assert await engine.next() == command
            await engine.say(Answered(None))
            await done

        await engine.start()
        await told(Sleep(2))
        await told(Sleep(1))  # nothing happens to one that sleeps deeper
        await engine.die()
        await engine.start()
        assert await engine.next() == Sleep(2)
        await engine.say(Answered(None))
        await told(WakeUp())
        await engine.die()
        await engine.start()
        await told(Profile(True))  # nothing comes before it
        await engine.die()

    asyncio.run(main())


def test_a_request_on_the_wire_when_a_step_fails_ends_and_is_aborted() -> None:
    async def main() -> None:
        engine = Engine(client := EngineClient(EngineConfig(model="fake")))
        await engine.start()
        streams = [EngineGroup([client]).submit([request("before")])]
        assert isinstance(await engine.next(), Add)
        await engine.say(StepFailed())
        # Before the failure is read
        streams.append(EngineGroup([client]).submit([request("crossing")]))
        for stream in streams:
            with pytest.raises(ApiError, match="send it again"):
                await stream.next_deltas()
        later = EngineGroup([client]).submit([request("later")])
        sent = [await engine.next() for _ in range(4)]
        assert [type(message) for message in sent] == [Add, Abort, Abort, Add]
        assert sent[1:3] == [Abort("before"), Abort("crossing")]
        assert (client.in_flight, client.choices) == (1, 1)
        later.abort()
        await engine.die()

    asyncio.run(main())


def test_an_abort_between_two_engines_reaches_neither() -> None:
    async def main() -> None:
        engine = Engine(client := EngineClient(EngineConfig(model="fake")))
        await engine.start()
        stream = EngineGroup([client]).submit([request("old")])
        await engine.say(Outputs([], EngineStats(steps=9)))
        await engine.die()
        assert (client.stats, client.choices) == (EngineStats(), 0)
        with pytest.raises(ApiError) as refused:
            EngineGroup([client]).submit([request("refused")])
        assert refused.value.code == "engine_down"
        stream.abort()  # its client has gone
        await engine.start()
        stream.abort()
        EngineGroup([client]).submit([request("new")])
        assert (await engine.next()).request.id == "new"  # type: ignore[union-attr]
        await engine.die()
        await engine.start()  # two deaths in a row
        assert (client.alive, client.in_flight, client.seconds_without_step()) == (True, 0, 0.0)
        await engine.die()

    asyncio.run(main())
