"""What a grammar must produce for one tool call, so that its parser reads exactly that call."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True):
    """What surrounds all calls of an output: begin, call, between, call, …, end."""

    begin: str = ""
    between: str = ""
    end: str = ""


# Keys that no schema names, as every format with marks around keys reads them: without white space
# and without what marks are made of
NEW_KEY = (
    r"[^\x00-\x20\"'<>:,{}\[\]\x7f-\xa0\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ufeff]{1,64}"
)
