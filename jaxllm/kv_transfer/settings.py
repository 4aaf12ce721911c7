"""The operator's choices about pages between engines: `--kv-transfer-config`, with vLLM's keys."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field, fields
from typing import Any, Self

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.connections.key_file import read_key

ROLES = ("kv_producer", "kv_consumer", "kv_both")
EXTRA = ("key_file", "timeout_seconds", "answer_early")
MAX_TEXT = 256  # characters
FLAG = "--kv-transfer-config"


@dataclass(frozen=True, kw_only=True)
class KVTransferSettings:
    """Which pages are sent or fetched. Raises ConfigError for a value that can never work.

    Attributes:
        kv_connector: "jaxllm"; there is one.
        kv_role: "kv_producer" sends pages of prompts that it has computed, "kv_consumer" fetches
            them, "kv_both" does both.
        kv_ip: address where a producer listens, and that consumers are told.
        kv_port: its port; 0 takes any.
        kv_buffer_size: bytes of host memory for pages that consumers may fetch.
        engine_id: the engine's name in what clients carry.
        kv_connector_extra_config: `key_file`, a file whose contents both sides share;
            `timeout_seconds` from one page to the next, after which a request computes what has not
            come; `answer_early`, whether a producer answers when it begins to compute a prompt.
    """

    kv_role: str
    kv_connector: str = "jaxllm"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_size: float = 1e9
    engine_id: str = field(default_factory=lambda: secrets.token_hex(8))
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, config: dict[str, Any] | None) -> Self | None:
        """The settings in a JSON object; None where nothing is transferred. Raises ConfigError."""
        if config is None:
            return None
        known = {field.name for field in fields(cls)}
        if unknown := sorted(config.keys() - known):
            raise refused(f"{unknown[0]!r:.80} is unknown; known are {', '.join(sorted(known))}")
        return cls(**({"kv_role": None} | config))

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """The settings of an engine, which can hold pages; None where nothing is transferred.
        Raises ConfigError."""
        settings = cls.read(config.kv_transfer_config)
        if settings is not None and not config.kv_offloading_size:
            raise refused("pages pass through host memory; give --kv-offloading-size")
        return settings

    def __post_init__(self) -> None:
        if self.kv_connector != "jaxllm":
            raise refused(f'kv_connector must be "jaxllm", got {self.kv_connector!r:.80}')
        if self.kv_role not in ROLES:
            raise refused(f"kv_role must be one of {', '.join(ROLES)}, got {self.kv_role!r:.80}")
        if not is_address(self.kv_ip):
            raise refused(
                "kv_ip must be an IP address of this machine by which consumers reach it, "
                f"got {self.kv_ip!r:.80}"
            )
        if type(self.kv_port) is not int or not 0 <= self.kv_port < 2**16:
            raise refused(f"kv_port must be a port from 0 to 65535, got {self.kv_port!r:.80}")
        size = self.kv_buffer_size
        if type(size) not in (int, float) or not 1 <= size <= 2**50:
            raise refused(f"kv_buffer_size must be a number of bytes above 0, got {size!r:.80}")
        name = self.engine_id
        if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT or not name.isprintable():
            raise refused(f"engine_id must be a text of 1 to {MAX_TEXT} characters")
        self._check_extra()

    def _check_extra(self) -> None:
        extra = self.kv_connector_extra_config
        if not isinstance(extra, dict):
            raise refused("kv_connector_extra_config must be an object")
        if unknown := sorted(extra.keys() - set(EXTRA)):
            raise refused(
                f"kv_connector_extra_config: {unknown[0]!r:.80} is unknown; "
                f"known are {', '.join(EXTRA)}"
            )
        if not isinstance(extra.get("key_file"), str):
            raise refused(
                "kv_connector_extra_config needs key_file, a file with a key that both sides share"
            )
        seconds = self.timeout_seconds
        if type(seconds) not in (int, float) or not 0 < seconds <= 600:
            raise refused(f"timeout_seconds must be above 0 and at most 600, got {seconds!r:.80}")
        if type(self.answers_early) is not bool:
            raise refused(f"answer_early must be true or false, got {self.answers_early!r:.80}")

    @property
    def sends(self) -> bool:
        """Whether others fetch pages here."""
        return self.kv_role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        """Whether pages are fetched from others."""
        return self.kv_role != "kv_producer"

    @property
    def answers_early(self) -> bool:
        """Whether requests that only want pages are answered before they have a token."""
        early: bool = self.kv_connector_extra_config.get("answer_early", False)
        return early

    @property
    def timeout_seconds(self) -> float:
        """Seconds that a request waits for the next page, at most."""
        seconds: float = self.kv_connector_extra_config.get("timeout_seconds", 5.0)
        return seconds

    def read_key(self) -> bytes:
        """The shared key. Raises ConfigError when its file cannot be read or has none."""
        path = self.kv_connector_extra_config["key_file"]
        return read_key(path, f"{FLAG}: key_file")


def refused(problem: str) -> ConfigError:
    """The error of an illegal setting."""
    return ConfigError(f"{FLAG}: {problem}")


def is_address(value: Any) -> bool:
    """Whether it is the address of one machine."""
    try:
        return isinstance(value, str) and not ipaddress.ip_address(value).is_unspecified
    except ValueError:
        return False
