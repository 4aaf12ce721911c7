"""The operator's choices about KV events: `--kv-events-config`, with vLLM's keys."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from jaxllm.config import ConfigError

PUBLISHERS = ("zmq", "null")
FORMATS = ("map", "array")
MAX_TEXT = 256  # characters of an endpoint and of the topic
ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\[\]:/@]+):(\d{1,5})|ipc://.+")

EVERYWHERE = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\]):")  # all interfaces


@dataclass(frozen=True, kw_only=True)
class KVEventSettings:
    """What is published, and where. Raises ConfigError for a value that can never work.

    Attributes:
        publisher: "zmq"; "null" publishes nothing: only listeners in the process hear of events.
        endpoint: address of the PUB socket.
        bind: whether that socket binds to its address, or connects to a subscriber that does; None:
            it binds to addresses of this machine and to all interfaces (*), as vLLM's.
        replay_endpoint: address of the ROUTER socket that sends old messages again; None: nowhere.
        buffer_steps: messages that are kept for it, at most.
        hwm: messages that wait for a slow subscriber; it loses newer ones.
        max_queue_size: vLLM's; nothing is queued here, because each step sends its own events.
        topic: first frame of each message, by which subscribers choose.
        format: of an event: "map", with its name under `type`, or "array", with its name first.
        data_parallel_rank: told with each batch: the number of the engine among those of its model.
    """

    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "map"
    data_parallel_rank: int = 0

    @classmethod
    def read(cls, config: dict[str, Any] | None) -> Self | None:
        """The settings in a JSON object; None when events are off. Raises ConfigError."""
        if config is None:
            return None
        known = {field.name for field in fields(cls)}
        keys = known | {"enable_kv_cache_events"}
        if unknown := sorted(config.keys() - keys):
            raise refused(f"{unknown[0]!r:.80} is unknown; known are {', '.join(sorted(keys))}")
        enabled = config.get("enable_kv_cache_events", False)
        if type(enabled) is not bool:
            raise refused("enable_kv_cache_events must be true or false")
        settings = cls(**{name: value for name, value in config.items() if name in known})
        if enabled:
            return settings
        return None

    def __post_init__(self) -> None:
        for name, allowed in (("publisher", PUBLISHERS), ("format", FORMATS)):
            if (value := getattr(self, name)) not in allowed:
                raise refused(f"{name} must be {' or '.join(allowed)}, got {value!r:.80}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 10**6:
                raise refused(f"{name} must be a whole number from 1 to 1000000, got {value!r:.80}")
        rank = self.data_parallel_rank
        if type(rank) is not int or not 0 <= rank < 2**16:
            raise refused(f"data_parallel_rank must be a whole number from 0, got {rank!r:.80}")
        if self.bind not in (None, True, False):
            raise refused(f"bind must be true or false, got {self.bind!r:.80}")
        if not isinstance(self.topic, str) or len(self.topic) > MAX_TEXT:
            raise refused(f"topic must be a text of at most {MAX_TEXT} characters")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if not (value is None and name == "replay_endpoint") and not is_address(value):
                raise refused(
                    f"{name} must be an address such as tcp://127.0.0.1:5557 or ipc:///tmp/events, "
                    f"got {value!r:.80}"
                )

    def of_engine(self, number: int) -> Self:
        """Those of one of several engines: it has this number, and addresses to which it binds have
        ports that are higher by it (paths: names that end in it). Raises ConfigError."""
        endpoint = self.endpoint
        if self.binds:
            endpoint = moved(endpoint, number)
        replay_endpoint = self.replay_endpoint
        if replay_endpoint is not None:
            replay_endpoint = moved(replay_endpoint, number)
        return replace(
            self,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            data_parallel_rank=number,
        )

    @property
    def config(self) -> dict[str, Any]:
        """The JSON object that `read` takes."""
        return asdict(self) | {"enable_kv_cache_events": True}

    @property
    def binds(self) -> bool:
        """Whether the PUB socket binds."""
        everywhere = EVERYWHERE.match(self.endpoint) is not None
        if self.bind is None:
            return is_local(self.endpoint) or everywhere
        return self.bind

    @property
    def bound(self) -> list[str]:
        """The addresses to which sockets bind."""
        if self.binds:
            endpoints = [self.endpoint]
        else:
            endpoints = []
        if self.replay_endpoint is None:
            return endpoints
        return [*endpoints, self.replay_endpoint]

    @property
    def exposed(self) -> list[str]:
        """The addresses by which other machines may get events."""
        addresses = self.endpoint, self.replay_endpoint
        return [address for address in addresses if address is not None and not is_local(address)]


def refused(problem: str) -> ConfigError:
    """The error of an illegal setting."""
    return ConfigError(f"--kv-events-config: {problem}")


def moved(address: str, by: int) -> str:
    """The address of engine number `by`, where the first one has this."""
    head, colon, port = address.rpartition(":")
    if address.startswith("tcp:"):
        return f"{head}{colon}{int(port) + by}"
    if by:
        return f"{address}-{by}"
    return address


def is_address(value: Any) -> bool:
    """Whether a socket can bind to it."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    match = ADDRESS.fullmatch(value)
    return match is not None and (match[2] is None or int(match[2]) < 2**16)


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address."""
    match = ADDRESS.fullmatch(address)
    if match is None or match[1] is None:
        return True
    host = match[1].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface, or *
        return False
