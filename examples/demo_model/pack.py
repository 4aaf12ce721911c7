"""Samples to packed rows of tokens: which document a token belongs to, its position there, and
whether it is learnt."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from examples.demo_model.skills.corpus import corpus
from examples.demo_model.tokenizer import render, renderer

REPLY = re.compile(
    r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL
)
BATCH = 2_000  # documents encoded in one call
OPEN_ROWS = 8  # that a document may still join


@dataclass(frozen=True)
class Rows:
    """Packed training rows, all `[rows, length]`; segment 0 is padding and `learn` marks tokens to
    be predicted."""

    token_NT: np.ndarray
    segment_NT: np.ndarray
    position_NT: np.ndarray
    learn_NT: np.ndarray


def learnt(text: str, encoding: Encoding, chat: bool) -> np.ndarray:
    """`[tokens]` bool: replies of the assistant up to their `<|im_end|>`, or every token of a plain
    line but the first."""
    mask = np.zeros(len(encoding.ids), bool)
    if not chat:
        mask[1:] = True
        return mask
    start = np.array([offset[0] for offset in encoding.offsets])
    for match in REPLY.finditer(text):
        mask |= (start >= match.start(1)) & (start < match.end(1))
    return mask


def encode(job: tuple[str, int, int, tuple[int, ...]]) -> list[Rows]:
    """One worker's share of rows. `job` is (tokenizer text, seed, documents, row lengths)."""
    text, seed, documents, lengths = job
    tokenizer, template = Tokenizer.from_str(text), renderer()
    filler = Filler(*lengths)
    batch: list[tuple[str, bool]] = []
    for i, sample in enumerate(corpus(seed, documents), 1):
        batch.append((render(template, sample), bool(sample.messages)))
        if len(batch) == BATCH or i == documents:
            for (rendered, chat), encoding in zip(
                batch, tokenizer.encode_batch([rendered for rendered, _ in batch]), strict=True
            ):
                filler.add(np.array(encoding.ids, np.int16), learnt(rendered, encoding, chat))
            batch.clear()
    return filler.rows()


class _Row:
    """A row that is being filled: tokens, segments, positions, learn marks."""

    def __init__(self, length: int) -> None:
        self.columns = np.zeros((4, length), np.int16)
        self.used = self.segment = 0

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return int(self.columns.shape[1]) - self.used

    def add(self, ids: np.ndarray, marks: np.ndarray) -> None:
        """Append a document, which fits."""
        span = slice(self.used, self.used + len(ids))
        self.segment += 1
        self.used += len(ids)
        for column, values in zip(
            self.columns, (ids, self.segment, np.arange(len(ids)), marks), strict=True
        ):
            column[span] = values


class Filler:
    """Lays documents into rows of a few lengths: into the fullest open row that has room, else into
    a new row of the smallest length that fits. One longer than every row is cut."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = sorted(lengths)
        self._done: dict[int, list[np.ndarray]] = {length: [] for length in self._lengths}
        self._open: list[_Row] = []

    def add(self, ids: np.ndarray, marks: np.ndarray) -> None:
        """Append one document's tokens and learn marks."""
        size = min(len(ids), self._lengths[-1])
        fitting = [row for row in self._open if row.room >= size]
        if fitting:
            row = min(fitting, key=lambda row: row.room)
        else:
            row = _Row(next(length for length in self._lengths if length >= size))
            self._open.append(row)
        row.add(ids[:size], marks[:size])
        if len(self._open) > OPEN_ROWS:
            self._close(min(self._open, key=lambda row: row.room))

    def _close(self, row: _Row) -> None:
        self._open.remove(row)
        self._done[row.columns.shape[1]].append(row.columns)

    def rows(self) -> list[Rows]:
        """Everything added so far, rows of one length together, shorter ones first; their ends are
        padded."""
        while self._open:
            self._close(self._open[0])
        made = []
        for length, done in self._done.items():
            columns = np.stack(done, axis=1) if done else np.zeros((4, 0, length), np.int16)
            token, segment, position, learn = columns
            made.append(Rows(token, segment, position, learn.astype(bool)))
        return made


def pack(
    tokenizer_file: Path, documents: int, lengths: tuple[int, ...], seed: int, workers: int = 1
) -> list[Rows]:
    """Generate, encode and pack `documents` documents with `workers` processes, into rows of each
    length; the result depends on `workers` too."""
    text = tokenizer_file.read_text()
    jobs = [(text, seed * 10_000 + i, documents // workers, lengths) for i in range(workers)]
    if workers == 1:
        return encode(jobs[0])
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(encode, jobs)
    names = [field.name for field in fields(Rows)]
    return [
        Rows(*(np.concatenate([getattr(rows, name) for rows in same]) for name in names))
        for same in zip(*parts, strict=True)
    ]
