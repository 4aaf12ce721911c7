"""TLS: certificates from files, which may be replaced while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass

from jaxllm.config import ConfigError

WATCH_SECONDS = 1.0  # between two looks at the files

logger = logging.getLogger("jaxllm.server")


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The operator's choices.

    Attributes:
        certfile: PEM file of the certificate and those above it.
        keyfile: PEM file of its private key; None: it is in `certfile`.
        password: of an encrypted key.
        ca_certs: PEM file of the authorities that sign clients' certificates.
        cert_reqs: clients send no certificate (0), may send one (1), must send one (2).
        ciphers: OpenSSL's list of ciphers for TLS 1.2; None: Python's choice.
    """

    certfile: str
    keyfile: str | None = None
    password: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None

    def paths(self) -> list[str]:
        """Every file."""
        return [path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None]


class Certificates:
    """The context of a server's connections; new ones get what was loaded last."""

    def __init__(self, files: TlsFiles):
        """Raises ConfigError when the files do not make a working server."""
        self._files = files
        self._seen = self._versions()
        self.context = self._loaded()

    def refresh(self) -> bool:
        """Load the files again if one has changed since; returns whether new ones are in use.

        Files that do not fit together, as while they are being replaced, are left alone until
        they change again.
        """
        versions = self._versions()
        if versions == self._seen:
            return False
        self._seen = versions
        try:
            self._loaded()  # a context that a bad file may spoil
            self._load(self.context)
        except ConfigError as error:
            logger.warning("the certificate in use stays: %s", error)
            return False
        logger.info("the certificate of %s is in use for new connections", self._files.certfile)
        return True

    async def watch(self) -> None:
        """`refresh` from time to time. Runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.refresh()

    def _versions(self) -> list[tuple[int, int, int] | None]:
        """Of each file, what changes with it; a link that points elsewhere is another file."""
        versions: list[tuple[int, int, int] | None] = []
        for path in self._files.paths():
            try:
                status = os.stat(path)
                versions.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except (OSError, ValueError):  # ValueError: no path at all
                versions.append(None)
        return versions

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later
        context.set_alpn_protocols(["http/1.1"])
        context.verify_mode = ssl.VerifyMode(self._files.cert_reqs)
        if self._files.ciphers is not None:
            try:
                context.set_ciphers(self._files.ciphers)
            except ssl.SSLError:
                raise ConfigError(
                    f"--ssl-ciphers {self._files.ciphers:.200} names no cipher that OpenSSL has"
                ) from None
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        files = self._files
        try:
            # Without a password, OpenSSL would ask for one at the terminal
            context.load_cert_chain(files.certfile, files.keyfile, lambda: files.password or "")
        except (OSError, ValueError) as error:
            key = "" if files.keyfile is None else f" and --ssl-keyfile {files.keyfile}"
            raise ConfigError(
                f"--ssl-certfile {files.certfile}{key} cannot be used: {_reason(error)}; they must "
                "be PEM files of a certificate and its key (--ssl-keyfile-password opens a key)"
            ) from None
        if files.ca_certs is not None:
            try:
                context.load_verify_locations(files.ca_certs)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"--ssl-ca-certs {files.ca_certs} cannot be used: {_reason(error)}"
                ) from None


def _reason(error: Exception) -> str:
    """OpenSSL's or the system's words."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
