"""Hosts meet, agree, follow, and end together."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from jaxllm.config import ConfigError
from jaxllm.hosts import channel, controller, follower
from jaxllm.hosts.channel import Channel
from jaxllm.hosts.controller import Controller, listen
from jaxllm.hosts.follower import Follower
from jaxllm.hosts.group import ALONE, GroupError, Place, difference, shown

KEY = b"a key of sixteen bytes or more"
FACTS = {"jaxllm": "1.0", "--max-num-seqs": "8"}


@dataclass
class Meeting:
    """Hosts in threads of this process. `lost` has what the controller says of followers,
    `orphaned` what those say of it."""

    place: Place
    lost: queue.Queue[str] = field(default_factory=queue.Queue)
    orphaned: queue.Queue[str] = field(default_factory=queue.Queue)

    def lead(self) -> Controller:
        """The controller, once all are there."""
        return Controller(self.place, FACTS, self.lost.put)

    def follow(self, rank: int, key: bytes = KEY, **facts: str) -> Follower:
        """A follower, once all are there."""
        return Follower(replace(self.place, rank=rank, key=key), FACTS | facts, self.orphaned.put)


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Meeting]:
    """Makes a meeting of so many hosts at a free port."""
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.01)
    # Followers of tests are no processes that end
    monkeypatch.setattr(controller, "LAST_WORDS", 0.05)

    def make(count: int) -> Meeting:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return Meeting(Place(0, count, "127.0.0.1", port, KEY))

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for hosts."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def all_of(meeting: Meeting, pool: ThreadPoolExecutor) -> tuple[Controller, list[Follower]]:
    """A whole group."""
    leading = pool.submit(meeting.lead)
    following = [pool.submit(meeting.follow, rank) for rank in range(1, meeting.place.count)]
    return leading.result(10), [each.result(10) for each in following]


def test_hosts_agree_and_followers_hear_every_command_in_order(meet, pool) -> None:
    leader, followers = all_of(meet(3), pool)
    sayings: list[Future] = [pool.submit(each.agree, at + 1) for at, each in enumerate(followers)]
    assert leader.agree(0) == [0, 1, 2]
    assert [saying.result(10) for saying in sayings] == [[0, 1, 2]] * 2
    commands = [str(at).encode() for at in range(100)]
    for command in commands:
        leader.tell(command)
    leader.close()
    assert [list(each.commands()) for each in followers] == [commands] * 2
    for each in followers:
        each.close()


def test_one_host_agrees_with_itself() -> None:
    assert ALONE.agree({"pages": 3}) == [{"pages": 3}]


def test_a_follower_that_goes_is_named_to_the_others(meet, pool) -> None:
    meeting = meet(2)
    leader, (other,) = all_of(meeting, pool)
    other.close()
    assert meeting.lost.get(timeout=10).startswith("host 1 of 2 has gone")
    with pytest.raises(GroupError):
        leader.agree(1)
    leader.close()


def test_a_follower_that_fails_says_why(meet, pool) -> None:
    meeting = meet(2)
    leader, (other,) = all_of(meeting, pool)
    other.close("the device has no memory\nleft")
    found = meeting.lost.get(timeout=10)
    assert found == "host 1 of 2 has ended: the device has no memory left"
    leader.close()
    other.close()


@pytest.mark.parametrize("reason", ["", "a step failed"])
def test_a_controller_that_goes_ends_its_followers(reason: str, meet, pool) -> None:
    meeting = meet(2)
    leader, (other,) = all_of(meeting, pool)
    if reason:
        leader.close(reason)
    else:
        for channel in leader._channels.values():  # as when the process is killed
            channel.close()
    other.hear_out(10)
    found = meeting.orphaned.get_nowait()
    assert found.startswith(f"the controller at {meeting.place.where} has")
    assert reason in found
    with pytest.raises(GroupError):
        list(other.commands())
    other.close()
    leader.close()


def test_a_host_that_differs_is_refused_and_the_group_waits_on(meet, pool) -> None:
    meeting = meet(2)
    leading = pool.submit(meeting.lead)
    for facts, told in (
        ({"jaxllm": "0.9"}, r"refused this host: jaxllm is 0\.9 here and 1\.0 on the controller"),
        ({"--max-num-seqs": "4"}, "--max-num-seqs is 4 here and 8 on the controller"),
        ({"the checkpoint": "b"}, "the checkpoint is b here and nothing on the controller"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            meeting.follow(1, **facts)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--node-rank 2 is none of 1 to 1"):
        meeting.follow(2)
    with pytest.raises(ConfigError, match="the same --group-key-file"):
        meeting.follow(1, key=KEY + b"!")
    other = meeting.follow(1)
    leading.result(10).close()
    assert list(other.commands()) == []
    other.close()


def test_strangers_that_say_nothing_hold_nobody_up(meet, pool) -> None:
    meeting = meet(2)
    leading = pool.submit(meeting.lead)
    with ExitStack() as stack:
        while True:
            try:
                first = socket.create_connection(("127.0.0.1", meeting.place.port))
                break
            except ConnectionRefusedError:  # it does not listen yet
                continue
        stack.enter_context(first)
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", meeting.place.port)))
        other = pool.submit(meeting.follow, 1).result(10)
        leading.result(10).close()
    other.close()


def until_closed(silent: socket.socket) -> None:
    """Say nothing until the other end gives up."""
    with silent:
        while silent.recv(64):
            pass


def test_a_controller_that_strangers_keep_busy_is_asked_again(
    meet, pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MEET_SECONDS", 0.05)
    meeting = meet(2)
    with socket.create_server(("127.0.0.1", meeting.place.port)) as busy:
        following = pool.submit(meeting.follow, 1)
        until_closed(busy.accept()[0])
        second, _ = busy.accept()
    until_closed(second)
    monkeypatch.setattr(channel, "MEET_SECONDS", 5.0)
    leading = pool.submit(meeting.lead)
    following.result(10).close()
    leading.result(10).close()


def test_a_follower_that_is_started_again_takes_its_place(
    meet, pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, join = queue.Queue[int](), Controller._join

    def noted(self: Controller, rank: int, channel: Channel) -> None:
        join(self, rank, channel)
        joined.put(rank)

    monkeypatch.setattr(Controller, "_join", noted)
    meeting = meet(3)
    leading, first = pool.submit(meeting.lead), pool.submit(meeting.follow, 1)
    assert joined.get(timeout=10) == 1
    again = pool.submit(meeting.follow, 1)
    with pytest.raises(ConfigError, match="does not take this host"):
        first.result(10)
    third = pool.submit(meeting.follow, 2)
    leading.result(10).close()
    for each in (again, third):
        each.result(10).close()


def test_hosts_that_never_come_are_named(meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "JOIN_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="those with --node-rank 1, 2 did not come"):
        meet(3).lead()


def test_a_controller_that_never_comes_is_an_error(meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "JOIN_SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"no controller at 127\.0\.0\.1"):
        meet(2).follow(1)


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "RESOLVE_SECONDS", 0)
    monkeypatch.setattr(controller, "RETRY_SECONDS", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--master-addr must be an address of the host"):
        listen("192.0.2.1", port)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="cannot listen at leader:"):
        listen("leader", port)


def unknown(*_: object, **__: object) -> None:
    """A name that the network does not know."""
    raise socket.gaierror("no such name")


def test_what_others_say_is_shown_on_one_short_line() -> None:
    assert shown("a\nb\x1b[2J" + "x" * 1000)[:6] == "a b?[2" and len(shown("x" * 1000)) == 500
    assert difference(FACTS, FACTS) is None
