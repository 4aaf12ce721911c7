"""SentencePiece models: pieces with scores and kinds, how they were trained, how text is prepared.

Field numbers are those of `sentencepiece_model.proto` in google/sentencepiece.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from jaxllm.tokenizer_files.byte_pairs import MAX_TOKEN_BYTES
from jaxllm.tokenizer_files.protobuf import fields

# algorithms, the field model_type
UNIGRAM = 1
BPE = 2


class Kind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of the vocabulary."""

    text: str
    score: float = 0.0
    type: Kind = Kind.NORMAL


@dataclass
class Training:
    """`TrainerSpec`: the fields that encoding depends on."""

    algorithm: int = UNIGRAM
    treat_whitespace_as_suffix: bool = False
    byte_fallback: bool = False
    bos_piece: str = "<s>"
    eos_piece: str = "</s>"


@dataclass
class Preparation:
    """`NormalizerSpec`: what is done to text before it is encoded."""

    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


@dataclass
class Model:
    """`ModelProto`: pieces by their ids."""

    pieces: list[Piece] = field(default_factory=list)
    training: Training = field(default_factory=Training)
    preparation: Preparation = field(default_factory=Preparation)


TRAINING = {
    3: "algorithm",
    24: "treat_whitespace_as_suffix",
    35: "byte_fallback",
    46: "bos_piece",
    47: "eos_piece",
}
PREPARATION = {
    2: "precompiled_charsmap",
    3: "add_dummy_prefix",
    4: "remove_extra_whitespaces",
    5: "escape_whitespaces",
}


def read_model(data: bytes) -> Model:
    """The model in a file. Raises ValueError where the file is cut off or holds something else."""
    model = Model()
    for number, value in fields(memoryview(data)):
        if number == 1:
            model.pieces.append(_piece(_message(value)))
        elif number == 2:
            _fill(model.training, TRAINING, _message(value))
        elif number == 3:
            _fill(model.preparation, PREPARATION, _message(value))
    if not model.pieces:
        raise ValueError("there is no piece in it")
    texts = {piece.text for piece in model.pieces}
    if len(texts) != len(model.pieces):
        raise ValueError("a piece is there twice")
    return model


def _piece(data: memoryview) -> Piece:
    values = dict(fields(data))
    text = bytes(_message(values.get(1, memoryview(b""))))
    if not 0 < len(text) <= MAX_TOKEN_BYTES:
        raise ValueError(f"a piece has {len(text)} bytes; 1 to {MAX_TOKEN_BYTES} are possible")
    score = _message(values.get(2, memoryview(bytes(4))))
    if len(score) != 4:
        raise ValueError("a piece has a score that is no float")
    piece_type = values.get(3, Kind.NORMAL)
    if not isinstance(piece_type, int):
        raise ValueError("a piece has a kind that is no number")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(piece_type))


def _fill(target: Any, names: dict[int, str], data: memoryview) -> None:
    """Sets the fields of `target` that `data` states, in the type that they have by default."""
    for number, value in fields(data):
        if (name := names.get(number)) is None:
            continue
        field_type = type(getattr(target, name))
        if field_type in (int, bool):
            if not isinstance(value, int):
                raise ValueError(f"{name} is no number")
            setattr(target, name, field_type(value))
        else:
            content = bytes(_message(value))
            setattr(target, name, content.decode() if field_type is str else content)


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where text or a message is meant")
    return value
