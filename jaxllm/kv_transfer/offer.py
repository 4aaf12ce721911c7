"""What a client carries from the engine that computed a prompt to the one that continues it:
`kv_transfer_params`, with vLLM's names.

It names an address, so it is signed: a client could otherwise send an engine anywhere. It says
nothing of the prompt. The fetching engine knows the pages' hashes by itself, so a client cannot
pass off pages of another prompt, and none of another salt.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any, Self

from jaxllm.kv_transfer.settings import MAX_TEXT, is_address
from jaxllm.kv_transfer.wire import prove


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOffer:
    """Where an engine's pages are.

    Attributes:
        engine_id: its name.
        host, port: where it listens.
        fingerprint: of the model and the layout of its pages, as hexadecimal digits.
    """

    engine_id: str
    host: str
    port: int
    fingerprint: str

    def signed(self, key: bytes) -> dict[str, Any]:
        """The field's value."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "fingerprint": self.fingerprint,
            "signature": self._signature(key),
        }

    @classmethod
    def read(cls, params: dict[str, Any], key: bytes) -> Self:
        """The offer in the field's value. Raises ValueError unless an engine with this key has made
        it."""
        names = ("remote_engine_id", "remote_host", "fingerprint", "signature")
        texts = [params.get(name) for name in names]
        port = params.get("remote_port")
        if (
            type(port) is not int
            or not 0 < port < 2**16
            or not is_address(params.get("remote_host"))
        ):
            raise ValueError("remote_host and remote_port are no address")
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts):
            raise ValueError(f"{', '.join(names)} must be texts of at most {MAX_TEXT} characters")
        engine, host, fingerprint, signature = map(str, texts)
        offer = cls(engine_id=engine, host=host, port=port, fingerprint=fingerprint)
        if not hmac.compare_digest(offer._signature(key).encode(), signature.encode()):
            raise ValueError("no engine with this one's key has made it")
        return offer

    def _signature(self, key: bytes) -> str:
        texts = (self.engine_id, self.host, str(self.port), self.fingerprint)
        return prove(key, b"offer", *(text.encode() for text in texts)).hex()
