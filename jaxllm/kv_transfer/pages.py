"""Pages as bytes: the arrays of one page, one behind the other, with the heads of all devices."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shapes and types of one page's arrays, whole, however many devices share them.

    Attributes:
        backend: of attention, which decides what lies where within an array.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    backend: str

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [int(np.prod(shape)) * dtype.itemsize for shape, dtype in pairs]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.sizes)

    def fingerprint(self, root: bytes) -> bytes:
        """Digest of what two engines must share to read each other's pages; `root` is that of
        their prefix indexes, which stands for the model."""
        layout = [*map(str, self.shapes), *(dtype.name for dtype in self.dtypes), self.backend]
        return hashlib.sha256(b"jaxllm/pages/1;" + root + repr(layout).encode()).digest()

    def split(self, page: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of the arrays in the bytes of a page."""
        ends = np.cumsum(self.sizes).tolist()
        return tuple(
            page[end - size : end].view(dtype).reshape(shape)
            for size, end, dtype, shape in zip(
                self.sizes, ends, self.dtypes, self.shapes, strict=True
            )
        )
