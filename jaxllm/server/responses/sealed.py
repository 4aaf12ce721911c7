"""Text for clients to keep and send back unread: reasoning, and summaries of conversations.

It goes into `encrypted_content`, which is opaque to clients. It is encoded, not encrypted: it says
nothing that the client may not know, and a client may send any text as a message anyway.
"""

from __future__ import annotations

import base64

PREFIX = "jaxllm-1."


def seal(text: str) -> str:
    """The opaque form of a text."""
    return PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(content: str) -> str | None:
    """The text that `seal` was given; None for anything else, such as another server's content."""
    if not content.startswith(PREFIX):
        return None
    try:
        return base64.b64decode(content[len(PREFIX) :], altchars=b"-_", validate=True).decode()
    except ValueError:  # no base64, or no UTF-8
        return None
