"""Keys that machines share, each in a file of its own."""

from __future__ import annotations

from jaxllm.config import ConfigError

KEY_BYTES = range(16, 4097)


def read_key(path: str, named: str) -> bytes:
    """The key in a file, without blanks around it; `named` is what messages call the file.

    Raises ConfigError when the file cannot be read, or has fewer or more than KEY_BYTES.
    """
    try:
        with open(path, "rb") as file:
            key = file.read(KEY_BYTES.stop + 1).strip()
    except (OSError, ValueError) as error:
        trouble = getattr(error, "strerror", None) or "its name is not legal"
        raise ConfigError(f"{named} {path!r:.200} cannot be read: {trouble}") from None
    if len(key) not in KEY_BYTES:
        raise ConfigError(
            f"{named} {path!r:.200} must have {KEY_BYTES.start} to {KEY_BYTES.stop - 1} bytes, "
            f"and has {len(key)}; make one with openssl rand -hex 32"
        )
    return key
