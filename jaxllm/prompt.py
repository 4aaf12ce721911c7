"""What a model reads before it generates. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """The start of a sequence: what is computed, and beside it what tells its prefixes apart.

    Attributes:
        tokens: ids of the model's vocabulary, which are computed.
        own_keys: a 32-bit number for each token, which is hashed in its place; None where the
            tokens themselves are. Numbers that stand for other content are negative: no token is.
        media: contents that stand at places of the tokens; no model takes any yet.

    Raises:
        ValueError: there are not as many keys as tokens.
    """

    tokens: list[int]
    own_keys: list[int] | None = None
    media: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.own_keys is not None and len(self.own_keys) != len(self.tokens):
            raise ValueError(
                f"a prompt of {len(self.tokens)} tokens has {len(self.own_keys)} keys; "
                "each token has one"
            )

    @property
    def keys(self) -> list[int]:
        """What is hashed for prefixes: prompts share pages where their keys are equal. It is
        `tokens` itself where nothing else is said."""
        if self.own_keys is None:
            return self.tokens
        return self.own_keys
