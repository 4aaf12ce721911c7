"""Certificates for tests, signed by an authority of their own; openssl makes them."""

from __future__ import annotations

import pathlib
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: pathlib.Path
    key: pathlib.Path


def openssl(*arguments: str | pathlib.Path) -> None:
    """Run it; a failure shows what it said."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def authority(directory: pathlib.Path) -> Pair:
    """One that signs itself, and may sign others."""
    made = Pair(directory / "ca.pem", directory / "ca.key")
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "7", "-subj", "/CN=tests", "-keyout", made.key, "-out", made.cert,
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign",
    )  # fmt: skip
    return made


def signed(directory: pathlib.Path, name: str, by: Pair, password: str = "") -> Pair:
    """A certificate for localhost."""
    made = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret,
        "-days", "7", "-subj", f"/CN={name}", "-keyout", made.key, "-out", made.cert,
        "-CA", by.cert, "-CAkey", by.key,
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-addext", "basicConstraints=critical,CA:FALSE",
    )  # fmt: skip
    return made
