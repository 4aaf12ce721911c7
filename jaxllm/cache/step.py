"""What a step tells the attention of its layers: where tokens lie, how layers attend, and how
kernels divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedInputs:
    """Where the tokens of a step lie in the pages of one cache group. The step has B decode tokens,
    then the tokens of R ragged chunks; either part may be empty.

    Attributes:
        decode_tables_BM, chunk_tables_RM: Page tables.
        decode_lengths_B: Tokens of a row, the new one included; 0 = row not in use.
        chunk_starts_R: First token of a chunk, counted from the first chunk token.
        chunk_lengths_R: Tokens of a chunk; 0 = row not in use.
        chunk_kv_lengths_R: Tokens of the cached prefix and the chunk.
        write_page_T, write_offset_T: Where each token's KV is written; page `DROP_PAGE` drops it.
    """

    decode_tables_BM: Array
    decode_lengths_B: Array
    chunk_tables_RM: Array
    chunk_starts_R: Array
    chunk_lengths_R: Array
    chunk_kv_lengths_R: Array
    write_page_T: Array
    write_offset_T: Array

    @property
    def chunks(self) -> tuple[Array, Array, Array]:
        """Starts, lengths and KV lengths of the chunks."""
        return self.chunk_starts_R, self.chunk_lengths_R, self.chunk_kv_lengths_R


@dataclass(frozen=True)
class StaticOptions:
    """The static options of a layer's attention; layers with equal ones share a trace."""

    backend: str
    scale: float
    no_split: bool
    window: int | None = None
    softcap: float | None = None


class Plans(NamedTuple):
    """How the kernels of a step divide their work; None where a back end makes no plan or there are
    no tokens. Only the kernels read them."""

    decode: Any
    extend: Any
