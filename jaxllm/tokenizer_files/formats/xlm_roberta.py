"""XLM-RoBERTa: a SentencePiece model whose pieces fairseq numbers anew, behind its own special
tokens. Texts stand between `<s>` and `</s>`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tokenizers import processors

from jaxllm.tokenizer_files.byte_pairs import Built
from jaxllm.tokenizer_files.pieces import Kind, Model, Piece, read_model
from jaxllm.tokenizer_files.sentencepiece import SentencePiece
from jaxllm.tokenizer_files.settings import Settings

BEGIN = "<s>"
END = "</s>"
FIRST = tuple(Piece(text, type=Kind.CONTROL) for text in (BEGIN, "<pad>", END))
OWN = ("<unk>", BEGIN, END)  # the first pieces of a model that fairseq reads


@dataclass(frozen=True)
class Fairseq(SentencePiece):
    """A SentencePiece model whose ids are not its own."""

    file_kind: ClassVar[str] = "fairseq"

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""
        made = self.tokenizer(_renumbered(read_model(data)), settings)
        made.backend.post_processor = processors.TemplateProcessing(
            single=[BEGIN, "$A", END],
            pair=[BEGIN, "$A", END, END, "$B", END],
            special_tokens=[(name, made.backend.token_to_id(name)) for name in (BEGIN, END)],
        )
        return made


def _renumbered(model: Model) -> Model:
    """The model with fairseq's ids: special tokens first, other pieces one higher, a mask last."""
    texts = tuple(piece.text for piece in model.pieces[: len(OWN)])
    if texts != OWN:
        raise ValueError(f"its first pieces are {texts}; {OWN} are expected")
    unknown = Piece("<unk>", type=Kind.UNKNOWN)
    rest = model.pieces[len(OWN) :]
    return replace(model, pieces=[*FIRST, unknown, *rest, Piece("<mask>", type=Kind.CONTROL)])


FORMAT = Fairseq(classes=("", "XLMRobertaTokenizer"))
