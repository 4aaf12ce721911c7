"""Keys of machines that talk to each other, in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.config import ConfigError
from jaxllm.connections.key_file import KEY_BYTES, read_key

KEY = b"a key of sixteen bytes or more"


def test_a_key_is_read_from_a_file_and_is_not_short(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert read_key(str(path), "--key") == KEY
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"--key .* 16 to 4096 bytes, and has 5; make one"):
        read_key(str(path), "--key")
    with pytest.raises(ConfigError, match=r"--key .* cannot be read: No such file"):
        read_key(str(tmp_path / "none"), "--key")


def test_the_longest_key_is_whole_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    longest = b"x" * (KEY_BYTES.stop - 1)
    path.write_bytes(longest + b"\n")
    assert read_key(str(path), "--key") == longest
    path.write_bytes(longest + b"x\n")
    with pytest.raises(ConfigError, match="and has 4097"):
        read_key(str(path), "--key")
