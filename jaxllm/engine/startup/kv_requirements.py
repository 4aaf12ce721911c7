"""What the pools of KV pages must serve, and how many pages that takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxllm.cache.pool import CacheGroup


@dataclass(frozen=True)
class KVRequirements:
    """What the pools must serve.

    Layers with the same window are a cache group with a pool of its own. Page counts without a name
    are those of the first group. The other groups are sized so that all run out together when every
    request has the longest length. Beyond one such request they get what short requests use at
    once, whose windows are as large as those of long ones: up to a third of the bytes.

    Attributes:
        page_bytes: of a page of the first group, on one device.
        page_size: tokens of a page.
        max_num_seqs: requests at once.
        max_model_len: tokens of the longest request.
        step_tokens: tokens of the largest step.
        windows: tokens of each group's window; None sees all.
        tile: keys that a kernel reads at once.
        more_bytes: bytes of a page of each group after the first, on one device.
        splits: over how many times the devices weights and pages divide evenly.
    """

    page_bytes: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    step_tokens: int = 0
    windows: tuple[int | None, ...] = (None,)
    tile: int = 1
    more_bytes: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()

    @property
    def group_bytes(self) -> int:
        """Bytes on one device of a page of every group."""
        return self.page_bytes + sum(self.more_bytes)

    @property
    def pages_per_request(self) -> int:
        """Pages that the longest request holds at once."""
        return self.group_pages_per_request[0]

    @property
    def group_pages_per_request(self) -> tuple[int, ...]:
        """The same for each cache group."""
        groups = (CacheGroup(window, self.step_tokens, self.tile) for window in self.windows)
        return tuple(group.max_resident(self.max_model_len, self.page_size) for group in groups)

    def more_pages(self, pages: int) -> tuple[int, ...]:
        """Pages of each group after the first, which has `pages`."""
        first, *others = self.group_pages_per_request
        # Bytes for a group
        beyond = max(0, pages - first) * self.page_bytes // (2 * max(1, len(others)))
        found = []
        for window, longest, size in zip(self.windows[1:], others, self.more_bytes, strict=True):
            group = CacheGroup(window, tile=self.tile)
            decoding = min(longest, group.decode_bound(self.page_size) or longest)
            # At once, since one prompt at a time is computed in part
            used = min(pages, (self.max_num_seqs - 1) * decoding + longest)
            found.append(max(-(-pages * longest // first), min(used, longest + beyond // size)))
        return tuple(found)

    def more_pages_for(self, length: int, pages: int) -> tuple[int, ...]:
        """`more_pages` when the longest sequence has `length` tokens: groups whose windows are no
        shorter become one."""
        found = {
            effective_window(window, length): count
            for window, count in zip(
                self.windows[1:],
                replace(self, max_model_len=length).more_pages(pages),
                strict=True,
            )
        }
        return tuple(found[window] for window in self.windows_for(length)[1:])

    def windows_for(self, length: int) -> tuple[int | None, ...]:
        """The groups' windows when the longest sequence has `length` tokens."""
        return group_windows(effective_window(window, length) for window in self.windows)

    def bytes_of(self, pages: int) -> int:
        """Bytes on one device of `pages` and the other groups' pages."""
        more = zip(self.more_pages(pages), self.more_bytes, strict=True)
        return pages * self.page_bytes + sum(count * size for count, size in more)

    def pages_in(self, size: int) -> int:
        """The most pages whose bytes, with those of the other groups, are at most `size`."""
        if not self.more_bytes:
            return size // self.page_bytes
        return bisect_right(range(size // self.page_bytes + 1), size, key=self.bytes_of) - 1


def effective_window(window: int | None, length: int) -> int | None:
    """The window, or None where a sequence of `length` tokens fits it."""
    return None if window is None or window >= length else window


def group_windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The different windows, a cache group each: None first, then wide before narrow."""
    return tuple(sorted(set(windows), key=lambda window: -math.inf if window is None else -window))
