"""Samples to packed rows of tokens: which document a token belongs to, its position there, and
whether it is learnt."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from examples.demo_model.generate import Sample, corpus
from examples.demo_model.tokenizer import renderer

REPLY = re.compile(
    r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL
)
BATCH = 2_000  # documents encoded in one call


@dataclass(frozen=True)
class Rows:
    """Packed training rows, all `[rows, length]`; segment 0 is padding and `learn` marks tokens to
    be predicted."""

    token_NT: np.ndarray
    segment_NT: np.ndarray
    position_NT: np.ndarray
    learn_NT: np.ndarray


def render(template: object, sample: Sample) -> str:
    """The document's text: a chat through the template, a line ended by `<|endoftext|>`."""
    if not sample.messages:
        return sample.text + "<|endoftext|>"
    return template.render(messages=sample.messages, tools=sample.tools)  # type: ignore[attr-defined]


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


def encode(job: tuple[str, int, int, int]) -> Rows:
    """One worker's share of rows. `job` is (tokenizer text, seed, documents, row length)."""
    text, seed, documents, length = job
    tokenizer, template = Tokenizer.from_str(text), renderer()
    filler = Filler(length)
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


class Filler:
    """Lays documents one after the other; one that does not fit opens a new row, one longer than a
    row is cut."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._done: list[np.ndarray] = []
        self._open()

    def _open(self) -> None:
        self._row, self._used, self._segment = np.zeros((4, self._length), np.int16), 0, 0

    def add(self, ids: np.ndarray, marks: np.ndarray) -> None:
        """Append one document's tokens and learn marks."""
        size = min(len(ids), self._length)
        if self._used + size > self._length:
            self._done.append(self._row)
            self._open()
        span = slice(self._used, self._used + size)
        self._segment += 1
        self._used += size
        self._row[0, span], self._row[1, span], self._row[2, span], self._row[3, span] = (
            ids[:size],
            self._segment,
            np.arange(size),
            marks[:size],
        )

    def rows(self) -> Rows:
        """Everything added so far, the last row padded."""
        token, segment, position, learn = np.stack([*self._done, self._row], axis=1)
        return Rows(token, segment, position, learn.astype(bool))


def pack(tokenizer_file: Path, documents: int, length: int, seed: int, workers: int = 1) -> Rows:
    """Generate, encode and pack `documents` documents with `workers` processes; the result depends
    on `workers` too."""
    text = tokenizer_file.read_text()
    jobs = [(text, seed * 10_000 + i, documents // workers, length) for i in range(workers)]
    if workers == 1:
        return encode(jobs[0])
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(encode, jobs)
    return Rows(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Rows))
    )
