"""Mistral's tekken.json: bytes by rank behind the special tokens."""

from __future__ import annotations

import binascii
import json
from typing import Any, ClassVar

from tokenizers import AddedToken

from jaxllm.tokenizer_files.byte_pairs import Built, byte_level, frame
from jaxllm.tokenizer_files.settings import MAX_ID, Settings

# Files of before 2025 list no special tokens; these are meant
NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Tekken:
    """The format of tekken.json."""

    file_kind: ClassVar[str] = "tekken"
    classes: tuple[str, ...] = ()

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""
        try:
            content = json.loads(data)
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        try:
            config = content["config"]
            entries = content["vocab"]
            count = config["default_num_special_tokens"]
            pattern = config["pattern"]
            size = config["default_vocab_size"]
            names = _names(content.get("special_tokens"))
            ranks = _ranks(entries[: size - count])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an entry is missing or of another type: {error}") from None
        if not len(names) <= count < MAX_ID:
            raise ValueError(f"it names {len(names)} special tokens of {count}")
        names += [f"<SPECIAL_{id}>" for id in range(len(names), count)]
        added = {id: AddedToken(name, special=True) for id, name in enumerate(names)}
        backend = byte_level(ranks, count, pattern, added)
        roles = {role: name for role, name in ROLES.items() if name in names}
        before = []
        if settings.flag("add_bos_token", True):
            before.append(ROLES["bos_token"])
        frame(backend, before, ())
        return Built(backend, roles)


def _names(entries: Any) -> list[str]:
    if entries is None:
        return list(NAMES)
    names = {entry["rank"]: entry["token_str"] for entry in entries}
    if sorted(names) != list(range(len(entries))) or len(set(names.values())) != len(entries):
        raise ValueError(
            "the ranks of its special tokens are not 0, 1, …, or a name is there twice"
        )
    return [names[rank] for rank in sorted(names)]


def _ranks(entries: Any) -> dict[bytes, int]:
    ranks = {}
    for rank, entry in enumerate(entries):
        if entry["rank"] != rank:
            raise ValueError(f"token {rank} of its vocabulary has the rank {entry['rank']}")
        ranks[binascii.a2b_base64(entry["token_bytes"], strict_mode=True)] = rank
    if len(ranks) != len(entries):
        raise ValueError("a token of its vocabulary is there twice")
    return ranks


FORMAT = Tekken()
