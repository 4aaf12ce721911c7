"""The tokenizer of a GGUF file: its keys `tokenizer.ggml.*`, as `jaxllm.gguf.directory` writes
them into a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxllm.tokenizer_files.byte_pairs import Built, frame, place
from jaxllm.tokenizer_files.pieces import BPE, Kind, Model, Piece, Preparation, Training
from jaxllm.tokenizer_files.sentencepiece import SentencePiece
from jaxllm.tokenizer_files.settings import MAX_ID, Settings
from jaxllm.tokenizer_files.splits import SPLITS

PIECES = SentencePiece(classes=(), begins=True)
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Ggml:
    """The format; `model` says which of two kinds it is."""

    file_kind: ClassVar[str] = "ggml"
    classes: tuple[str, ...] = ()

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""
        keys = json.loads(data)
        tokens = _items(keys, "tokens", str)
        kinds = _items(keys, "token_type", int)
        if not 0 < len(tokens) < MAX_ID or len(kinds) not in (0, len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens and {len(kinds)} types of tokens")
        named = [Kind(number) for number in kinds] or [Kind.NORMAL] * len(tokens)
        if keys.get("model") == "gpt2":
            return _byte_pairs(keys, tokens, named, settings)
        if keys.get("model") == "llama":
            return PIECES.tokenizer(_pieces(keys, tokens, named), settings)
        raise ValueError(
            f"its tokenizer.ggml.model is {keys.get('model')!r:.80}; gpt2 and llama are read"
        )


def _items(keys: Mapping[str, Any], name: str, entry_type: type) -> Sequence[Any]:
    items = keys.get(name, [])
    if not isinstance(items, list) or any(type(item) is not entry_type for item in items):
        raise ValueError(f"tokenizer.ggml.{name} is no list of {entry_type.__name__}")
    return items


def _pieces(keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[Kind]) -> Model:
    """As a SentencePiece model whose pieces join by their scores."""
    scores = _items(keys, "scores", float)
    if len(scores) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError("a token is there twice, or not all have scores")
    pieces = [Piece(*fields) for fields in zip(tokens, scores, kinds, strict=True)]
    # Where tokenizer_config.json has none, the file had none, and these are meant
    bos, eos = (*tokens[1:3], "", "")[:2]
    training = Training(algorithm=BPE, byte_fallback=True, bos_piece=bos, eos_piece=eos)
    preparation = Preparation(
        add_dummy_prefix=keys.get("add_space_prefix", True) is True,
        remove_extra_whitespaces=keys.get("remove_extra_whitespaces", False) is True,
    )
    return Model(pieces, training, preparation)


def _byte_pairs(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[Kind], settings: Settings
) -> Built:
    name = keys.get("pre")
    if name not in SPLITS:
        raise ValueError(
            f"how text is split is tokenizer.ggml.pre, which is {name!r:.40} and not known: give "
            "the model's own tokenizer (--tokenizer)"
        )
    splits = SPLITS[name]
    added = {
        id: AddedToken(text, normalized=False, special=token_type is not Kind.USER_DEFINED)
        for id, (text, token_type) in enumerate(zip(tokens, kinds, strict=True))
        if token_type in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    }
    pieces = {
        text: id
        for id, (text, token_type) in enumerate(zip(tokens, kinds, strict=True))
        if token_type is not Kind.UNUSED
    }
    pairs = [_pair(merge) for merge in _items(keys, "merges", str)]
    backend = Tokenizer(models.BPE(place(pieces, added), pairs, ignore_merges=splits.whole))
    if splits.normalizer is not None:
        backend.normalizer = splits.normalizer
    backend.pre_tokenizer = splits.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([added[id] for id in sorted(added)])
    roles = {role: text for role in ROLES if (text := settings.token(role)) is not None}
    before = settings.flag("add_bos_token", splits.begins) and roles.get("bos_token")
    after = settings.flag("add_eos_token", False) and roles.get("eos_token")
    frame(backend, [before] if before else [], [after] if after else [])
    return Built(backend, roles)


def _pair(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)
    if space < 0:
        raise ValueError(f"the merge {merge!r:.80} is no pair")
    return merge[:space], merge[space + 1 :]


FORMAT = Ggml()
