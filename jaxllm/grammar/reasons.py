"""Why llguidance fails, in words for who wrote the grammar."""

from __future__ import annotations

NOTHING_ENDS = "nothing that ends can match it"


def plain(error: str) -> str:
    """llguidance's message without its parser's state, and without an option that clients cannot
    set."""
    text = error.split("<non-verbose/>")[0].split("<state>")[0].strip()
    text = text.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "Where several cases may match, write anyOf",
    )
    if text == "NoExtensionBias":
        return NOTHING_ENDS
    return text
