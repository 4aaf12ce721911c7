"""Tokenizers from SentencePiece models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.tokenizer_files.byte_pairs import Built, frame, merges, place
from jaxllm.tokenizer_files.charsmap import check_charsmap
from jaxllm.tokenizer_files.pieces import BPE, UNIGRAM, Kind, Model, Preparation, read_model
from jaxllm.tokenizer_files.settings import Settings

SPACE = "▁"  # what pieces have for a space
NEVER = -1e9  # the score of what is no piece


@dataclass(frozen=True)
class SentencePiece:
    """A format of tokenizers whose vocabulary is a SentencePiece model.

    Attributes:
        classes: tokenizer classes that repositories of the format name.
        after_pieces: special tokens behind the last piece.
        before: special tokens in front of each text.
        begins: whether a beginning of sequence is, too, unless `add_bos_token` says otherwise.
        prefix_once: whether only the beginning of a text gets the prefix space, not each part
            behind a special token, unless `legacy` is set.
    """

    classes: tuple[str, ...]
    after_pieces: tuple[AddedToken, ...] = ()
    before: tuple[str, ...] = ()
    begins: bool = False
    prefix_once: bool = False

    file_kind: ClassVar[str] = "sentencepiece"

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""
        return self.tokenizer(read_model(data), settings)

    def tokenizer(self, model: Model, settings: Settings) -> Built:
        """The tokenizer of a model. Raises ValueError for one that cannot be run."""
        check(model)
        added = self._added(model, settings.added)
        backend = Tokenizer(_model(model, added))
        once = self.prefix_once and _plain(model.preparation) and not settings.flag("legacy", False)
        _prepare(backend, model.preparation, once)
        backend.add_tokens([added[id] for id in sorted(added)])
        roles = {
            "bos_token": settings.token("bos_token") or model.training.bos_piece,
            "eos_token": settings.token("eos_token") or model.training.eos_piece,
        }
        if settings.flag("add_bos_token", self.begins):
            begin = [roles["bos_token"]]
        else:
            begin = []
        end = [roles["eos_token"]] if settings.flag("add_eos_token", False) else []
        frame(backend, [*begin, *self.before], end)
        return Built(
            backend, {k: v for k, v in roles.items() if backend.token_to_id(v) is not None}
        )

    def _added(self, model: Model, stated: Mapping[int, AddedToken]) -> dict[int, AddedToken]:
        taken = {token.content for token in stated.values()}
        behind = dict(enumerate(self.after_pieces, len(model.pieces)))
        added = {id: token for id, token in behind.items() if token.content not in taken}
        # SentencePiece searches prepared text for user-defined pieces; the Rust library would
        # prepare the pieces, too, which must not change more than their spaces
        prepared = _plain(model.preparation) and not model.preparation.add_dummy_prefix
        for id, piece in enumerate(model.pieces):
            if piece.type in (Kind.UNKNOWN, Kind.CONTROL) and piece.text not in taken:
                added[id] = AddedToken(piece.text, normalized=False, special=True)
            elif piece.type is Kind.USER_DEFINED and piece.text not in taken:
                added[id] = AddedToken(piece.text, normalized=prepared, special=False)
        return added | dict(stated)


def check(model: Model) -> None:
    """Raises ValueError for a model that cannot be run."""
    training = model.training
    preparation = model.preparation
    if training.algorithm not in (UNIGRAM, BPE):
        raise ValueError(f"its algorithm is {training.algorithm}; only unigram (1) and BPE (2) run")
    if training.treat_whitespace_as_suffix or not preparation.escape_whitespaces:
        raise ValueError("it has spaces behind words, or none in its pieces; neither runs")
    if sum(piece.type is Kind.UNKNOWN for piece in model.pieces) != 1:
        raise ValueError("it has not exactly one piece for what is unknown")
    if preparation.precompiled_charsmap:
        check_charsmap(preparation.precompiled_charsmap)


def _model(model: Model, added: Mapping[int, AddedToken]) -> models.Model:
    ids = place({piece.text: id for id, piece in enumerate(model.pieces)}, added)
    unknown = next(id for id, piece in enumerate(model.pieces) if piece.type is Kind.UNKNOWN)
    fallback = model.training.byte_fallback
    if model.training.algorithm == UNIGRAM:
        texts = {id: text for text, id in ids.items()}
        scores = dict(enumerate(piece.score for piece in model.pieces))
        table = [
            (texts.get(id, f"<|reserved_token_{id}|>"), scores.get(id, NEVER))
            for id in range(max(texts) + 1)
        ]
        return models.Unigram(table, unk_id=unknown, byte_fallback=fallback)
    ordered = sorted(enumerate(model.pieces), key=lambda item: -item[1].score)
    kept = [
        piece.text
        for id, piece in ordered
        if piece.type in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED) and ids.get(piece.text) == id
    ]
    return models.BPE(
        ids,
        list(merges(kept)),
        unk_token=added[unknown].content,
        fuse_unk=True,
        byte_fallback=fallback,
    )


def _plain(preparation: Preparation) -> bool:
    return not preparation.remove_extra_whitespaces and not preparation.precompiled_charsmap


def _prepare(backend: Tokenizer, preparation: Preparation, prefix_once: bool) -> None:
    steps: list[normalizers.Normalizer] = []
    if preparation.precompiled_charsmap:
        steps.append(normalizers.Precompiled(preparation.precompiled_charsmap))
    if preparation.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    out: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if preparation.add_dummy_prefix:
        out.append(decoders.Strip(content=" ", left=1, right=0))
    if preparation.add_dummy_prefix and prefix_once:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    elif preparation.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if backend.pre_tokenizer is None:
        steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(out)
