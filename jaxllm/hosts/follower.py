"""A host that does what the controller does."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.hosts.channel import Channel, ChannelError, SilentError
from jaxllm.hosts.group import (
    JOIN_SECONDS,
    RETRY_SECONDS,
    TELL_SECONDS,
    GroupError,
    Lost,
    Place,
    pack,
    shown,
    unpack,
)
from jaxllm.hosts.messages import (
    Command,
    End,
    Failed,
    Hello,
    Message,
    Opinion,
    Opinions,
    Welcome,
    decode,
    encode,
)

CONNECT_SECONDS = 5.0
AHEAD = 1024  # commands that may wait here; beyond them the controller waits

logger = logging.getLogger("jaxllm.engine")


class Follower:
    """Joins the group, then yields what the controller tells.

    `lost(reason)` is called in a thread when the controller has gone. Raises ConfigError when the
    controller refuses this host, or is not there within JOIN_SECONDS.
    """

    def __init__(self, place: Place, facts: dict[str, str], lost: Lost):
        self.count = place.count
        self._place = place
        self._lost = lost
        self._closed = False
        self._inbox: queue.Queue[Message | None] = queue.Queue(AHEAD)
        self._channel = self._meet()
        try:
            self._channel.send(encode(Hello(place.rank, facts)))
            answer = decode(self._channel.receive())
        except (ChannelError, ValueError) as error:
            self._channel.close()
            raise self._refused(error) from None
        if not isinstance(answer, Welcome):
            self._channel.close()
            reason = "it speaks out of turn"
            if isinstance(answer, Failed):
                reason = answer.reason
            raise ConfigError(f"the controller at {place.where} refused this host: {shown(reason)}")
        self._reader = threading.Thread(target=self._read, name="controller", daemon=True)
        self._reader.start()

    def agree(self, value: Any) -> list[Any]:
        """As of `Hosts`."""
        try:
            self._channel.send(encode(Opinion(pack(value))))
        except ChannelError:
            raise GroupError("the controller has gone") from None
        message = self._inbox.get()
        if not isinstance(message, Opinions):
            raise GroupError("the controller has gone, or is elsewhere in its start")
        return unpack(message.values)

    def commands(self) -> Iterator[bytes]:
        """What the controller tells, until it stops in order. Raises GroupError."""
        while isinstance(message := self._inbox.get(), Command):
            yield message.data
        if not isinstance(message, End):
            raise GroupError("the controller has gone")

    def hear_out(self, seconds: float) -> None:
        """Wait so long for word that a host has gone, or until nothing more can come. For an error
        that may be the first sign of it."""
        self._reader.join(seconds)

    def last_as_process(self) -> None:
        """Have the controller take this host for present until the process has ended."""
        self._channel.last_as_process()

    def close(self, reason: str = "") -> None:
        """Leave the group. With a reason, the connection ends with this process: until then the
        controller waits."""
        self._closed = True
        if not reason:
            self._channel.close()
            return
        with contextlib.suppress(ChannelError):
            self._channel.send(encode(Failed(reason)))

    def _meet(self) -> Channel:
        """The way to the controller: it may not have started yet, its name may not be known yet,
        and strangers who say nothing may keep it from answering."""
        start = time.monotonic()
        where = self._place.where
        told = start
        while True:
            try:
                return self._connect()
            except (OSError, SilentError) as error:
                if (now := time.monotonic()) > start + JOIN_SECONDS:
                    raise ConfigError(
                        f"no controller at {where} within {JOIN_SECONDS:.0f} s "
                        f"({getattr(error, 'strerror', None) or error}); start the host with "
                        "--node-rank 0, and check --master-addr and --master-port"
                    ) from None
                if now > told + TELL_SECONDS:
                    told = now
                    logger.warning("waiting for the controller at %s: %s", where, error)
            except ChannelError as error:
                raise self._refused(error) from None
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> Channel:
        sock = socket.create_connection((self._place.host, self._place.port), CONNECT_SECONDS)
        try:
            return Channel(sock, self._place.key, leads=False)
        except ChannelError:
            sock.close()
            raise

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"the controller at {self._place.where} does not take this host: {error}; see its log, "
            "and give all hosts the same --group-key-file"
        )

    def _read(self) -> None:
        why = "has gone"
        try:
            while True:
                message = decode(self._channel.receive())
                if isinstance(message, Failed):
                    why = f"has ended: {shown(message.reason)}"
                    break
                self._inbox.put(message)
                if isinstance(message, End):
                    return
        except (ChannelError, ValueError) as error:
            why = f"has gone: {error}"
        if not self._closed:
            self._lost(f"the controller at {self._place.where} {why}")
        self._inbox.put(None)
