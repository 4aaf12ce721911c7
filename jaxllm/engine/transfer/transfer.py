"""Opens both sides of `--kv-transfer-config` around a loaded engine."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.cache.transfer import page_shapes
from jaxllm.config import EngineConfig
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.host_memory import OTHERS, available_bytes
from jaxllm.engine.transfer.exporter import PageExporter
from jaxllm.engine.transfer.exports import NoExports, PageExports
from jaxllm.engine.transfer.fetcher import PageFetcher
from jaxllm.kv_transfer.client import Address, PageClient
from jaxllm.kv_transfer.offer import PageOffer
from jaxllm.kv_transfer.pages import PageLayout
from jaxllm.kv_transfer.server import PageServer, listen
from jaxllm.kv_transfer.settings import KVTransferSettings, refused
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.messages import GenerateRequest, RequestError

FIELD = "kv_transfer_params"
EXPOSED = (
    "KV pages are sent from %s port %d to who has the key, unencrypted: let nobody listen on the "
    "way (--kv-transfer-config)"
)

logger = logging.getLogger("jaxllm")


@dataclass(frozen=True)
class Endpoint:
    """What is asked for, before the model is loaded: the address is taken then already."""

    settings: KVTransferSettings
    key: bytes
    listener: socket.socket | None

    @staticmethod
    def open(config: EngineConfig) -> Endpoint | None:
        """The endpoint of a configuration, if it wants one. Raises ConfigError."""
        settings = KVTransferSettings.of(config)
        if settings is None:
            return None
        key = settings.read_key()
        listener = listen(settings.kv_ip, settings.kv_port) if settings.sends else None
        return Endpoint(settings, key, listener)

    def close(self) -> None:
        """Give the address back."""
        if self.listener is not None:
            self.listener.close()


class PageTransfer:
    """Both sides of an engine's transfers.

    Attributes:
        exporter: of a producer, else None.
        exports: what steps do for other engines: the exporter, or nothing.
        fetcher: of a consumer, else None.
        offer: what clients of a producer carry to a consumer.
    """

    def __init__(self, endpoint: Endpoint, runner: Runner, scheduler: Scheduler):
        """Raises ConfigError where no page fits the shelf."""
        settings = endpoint.settings
        self._key = endpoint.key
        layout = layout_of(runner)
        index = scheduler.kv_manager.prefixes.indexes[0]
        fingerprint = layout.fingerprint(index.root(None, None))
        size = layout.page_bytes
        self._fingerprint = fingerprint.hex()
        self.exporter: PageExporter | None = None
        self.exports: PageExports = NoExports()
        self.fetcher: PageFetcher | None = None
        self.offer: dict[str, Any] | None = None
        self._server: PageServer | None = None
        if endpoint.listener is not None:
            shelf = Shelf(pages_in(int(settings.kv_buffer_size), size), size)
            self._server = PageServer(endpoint.listener, self._key, shelf, fingerprint, size)
            if not ipaddress.ip_address(settings.kv_ip).is_loopback:
                logger.warning(EXPOSED, settings.kv_ip, self._server.port)
            prefixes = scheduler.kv_manager.prefixes
            self.exporter = PageExporter(
                runner, shelf, prefixes, settings.answers_early, scheduler.limits.max_model_len
            )
            self.exports = self.exporter
            self.offer = PageOffer(
                engine_id=settings.engine_id,
                host=settings.kv_ip,
                port=self._server.port,
                fingerprint=self._fingerprint,
            ).signed(self._key)
        if settings.fetches:
            seconds = settings.timeout_seconds
            client = PageClient(self._key, fingerprint, size, patience=seconds / 2)
            self.fetcher = PageFetcher(client, runner, scheduler, layout, seconds)

    def address(self, request: GenerateRequest) -> Address | None:
        """Where the pages of a request can be had; None where it names none that fit here. Raises
        RequestError when this engine cannot do what it asks."""
        if request.shares_pages and self.exporter is None:
            raise unavailable("do_remote_decode", "kv_producer")
        if request.page_offer is None:
            return None
        if self.fetcher is None:
            raise unavailable("do_remote_prefill", "kv_consumer")
        try:
            offer = PageOffer.read(request.page_offer, self._key)
        except ValueError as error:
            raise RequestError(f"{FIELD}: {error}", FIELD) from None
        return (offer.host, offer.port) if offer.fingerprint == self._fingerprint else None

    def close(self) -> None:
        """End all threads and connections."""
        for part in (self._server, self.exporter, self.fetcher):
            if part is not None:
                part.close()


class NoTransfer:
    """`PageTransfer` of an engine without `--kv-transfer-config`."""

    fetcher = None

    def __init__(self) -> None:
        self.exports = NoExports()

    def address(self, request: GenerateRequest) -> None:
        """Raises RequestError when a request asks for transfers."""
        if request.shares_pages or request.page_offer is not None:
            raise RequestError(
                f"{FIELD}: this server neither sends nor fetches KV pages; "
                "start it with --kv-transfer-config",
                FIELD,
                "unsupported_parameter",
            )


def pages_in(buffer: int, page: int) -> int:
    """Pages of `page` bytes in host memory of `buffer` bytes. Raises ConfigError."""
    if buffer < page:
        raise refused(f"kv_buffer_size holds no KV page, which takes {page} bytes; raise it")
    if buffer > (room := max(0, available_bytes() - OTHERS)):
        raise refused(f"kv_buffer_size is {buffer} bytes, but {room} are available; lower it")
    return buffer // page


def unavailable(what: str, role: str) -> RequestError:
    """The error of a request that asks a server for what its role does not do."""
    return RequestError(
        f"{FIELD}: {what} needs a server whose kv_role is {role} or kv_both",
        FIELD,
        "unsupported_parameter",
    )


def layout_of(runner: Runner) -> PageLayout:
    """The layout of the pages of a runner's pool."""
    shapes = page_shapes(runner.shapes.kv)
    return PageLayout(
        tuple(shape.shape for shape in shapes),
        tuple(np.dtype(shape.dtype) for shape in shapes),
        runner.shapes.model.backend,
    )
