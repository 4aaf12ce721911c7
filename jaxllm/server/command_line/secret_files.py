"""Keys in files, which no list of processes shows."""

from __future__ import annotations

import stat
from pathlib import Path

from jaxllm.config import ConfigError

MAX_KEYS_FILE = 1 << 20


def read_keys(
    plain_keys: list[str] | None, path: str | None, flag: str
) -> tuple[tuple[str, ...], list[str]]:
    """`plain_keys`, then the keys of the file at `path`, one a line; and notices.

    Raises ConfigError when the file cannot be read or has no key: a server that was to be guarded
    does not start open.
    """
    if path is None:
        return tuple(plain_keys or ()), []
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_KEYS_FILE + 1)
            mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        trouble = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{flag} {path} cannot be read: {trouble}") from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if len(text) > MAX_KEYS_FILE or not keys:
        raise ConfigError(
            f"{flag} {path} must have a key on each line, {MAX_KEYS_FILE} bytes at most"
        )
    open_to_all = stat.S_ISREG(mode) and mode & stat.S_IROTH
    notice = f"{flag} {path} can be read by every user of this machine (chmod o-r)"
    return (*(plain_keys or ()), *keys), [notice] if open_to_all else []
