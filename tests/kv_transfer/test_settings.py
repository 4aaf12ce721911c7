"""`--kv-transfer-config`: what it takes, and one line for what it does not."""

from __future__ import annotations

import pytest

from jaxllm.config import ConfigError
from jaxllm.kv_transfer.offer import PageOffer
from jaxllm.kv_transfer.settings import KVTransferSettings

EXTRA = {"key_file": "key"}
ON = {"kv_role": "kv_both", "kv_connector_extra_config": EXTRA}


def test_nothing_is_transferred_by_default():
    assert KVTransferSettings.read(None) is None


def test_the_defaults_listen_on_this_machine_alone():
    settings = KVTransferSettings.read(ON)
    assert settings is not None and settings.sends and settings.fetches
    assert (settings.kv_ip, settings.kv_port, settings.timeout_seconds) == ("127.0.0.1", 14579, 5.0)


@pytest.mark.parametrize(("role", "sends"), [("kv_producer", True), ("kv_consumer", False)])
def test_a_role_sends_or_fetches(role, sends):
    settings = KVTransferSettings.read({**ON, "kv_role": role})
    assert settings is not None and (settings.sends, settings.fetches) == (sends, not sends)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_role": None}, "kv_role must be one of"),
        ({"kv_connector": "NixlConnector"}, "kv_connector must be"),
        ({"kv_rank": 0}, "'kv_rank' is unknown"),
        ({"kv_ip": "0.0.0.0"}, "kv_ip must be an IP address"),
        ({"kv_ip": "decode.example"}, "kv_ip must be an IP address"),
        ({"kv_port": 65536}, "kv_port must be"),
        ({"kv_port": True}, "kv_port must be"),
        ({"kv_buffer_size": 0}, "kv_buffer_size must be"),
        ({"engine_id": "a\nb"}, "engine_id must be"),
        ({"kv_connector_extra_config": []}, "must be an object"),
        ({"kv_connector_extra_config": {}}, "needs key_file"),
        ({"kv_connector_extra_config": {**EXTRA, "backend": 1}}, "'backend' is unknown"),
        ({"kv_connector_extra_config": {**EXTRA, "timeout_seconds": 0}}, "timeout_seconds must"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_in_one_line(change, why):
    with pytest.raises(ConfigError, match=f"--kv-transfer-config: .*{why}") as error:
        KVTransferSettings.read(ON | change)
    assert "\n" not in str(error.value)


def test_a_key_is_what_its_file_holds(tmp_path):
    path = tmp_path / "key"
    settings = KVTransferSettings.read(ON | {"kv_connector_extra_config": {"key_file": str(path)}})
    assert settings is not None
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        settings.read_key()
    for text in ("short\n", "x" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="must have 16 to 4096 bytes"):
            settings.read_key()
    path.write_text("0123456789abcdef\n")
    assert settings.read_key() == b"0123456789abcdef"


OFFER = PageOffer(engine_id="e", host="127.0.0.1", port=1234, fingerprint="ab")
KEY = b"k" * 16


def test_an_offer_comes_back_as_it_was_made():
    assert PageOffer.read(OFFER.signed(KEY), KEY) == OFFER
    assert "k" * 16 not in str(OFFER.signed(KEY))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"remote_host": "10.0.0.1"}, "no engine with this one's key"),
        ({"remote_port": 1235}, "no engine with this one's key"),
        ({"fingerprint": "cd"}, "no engine with this one's key"),
        ({"signature": "é"}, "no engine with this one's key"),
        ({"remote_host": None}, "no address"),
        ({"remote_host": "example.org"}, "no address"),
        ({"remote_port": "1234"}, "no address"),
        ({"remote_port": 0}, "no address"),
        ({"signature": None}, "must be texts"),
        ({"remote_engine_id": "x" * 257}, "must be texts"),
    ],
    ids=["host", "port", "fingerprint", "signature", "null", "name", "text", "0", "none", "long"],
)
def test_an_offer_that_was_changed_names_no_address(change, why):
    with pytest.raises(ValueError, match=why):
        PageOffer.read(OFFER.signed(KEY) | change, KEY)


def test_an_offer_of_another_key_names_no_address():
    with pytest.raises(ValueError, match="key"):
        PageOffer.read(OFFER.signed(b"x" * 16), KEY)
