"""How much memory requests are going to take, so that they share the pool in turns and do not push
each other out. Imports no jax.

A request that is admitted too early is computed twice: once until it is preempted, and once again.
One that is admitted too late leaves rows of a step unused. So a request is admitted when what all
that run are expected to hold fits the pool for as many steps as its tokens are worth. How long
requests become is learnt from those that have ended.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from jaxllm.engine.scheduling.request import Request

KEPT = 256  # requests that the forecast learns from
ENOUGH = 16  # of them before it is believed
# Between 1 and 3 simulations differ little, be prompts or outputs long or short, known or not
WORTH = 2.0
UNKNOWN = 2048  # tokens that an output is expected to have at most, as long as nothing is known


class Share(NamedTuple):
    """What one request does to the pool: tokens still to come, pages that come back at its end,
    places left in its pages, and whether it takes pages until then."""

    to_come: int
    own: float
    places: int
    grows: bool = True


def bounded(share: Share, held: int, most: int | None, page_size: int) -> Iterable[Share]:
    """The share of a request that holds `held` pages and never more than `most` while it generates,
    if there is a limit: it grows for a while, and then goes on with what it has until its end."""
    if most is None:
        return (share,)
    # What is missing of a prompt goes to the places of pages that are given back
    places = max(0, share.places)
    until = places + max(0, most - held) * page_size
    if until >= share.to_come:
        return (share._replace(places=places),)
    grown = (until + (page_size - 1) / 2 - places) / page_size
    return Share(until, -grown, places), Share(share.to_come, share.own + grown, 0, grows=False)


class AdmissionEstimator:
    """Learns which part of `max_tokens` requests use."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._parts: list[float] = []  # the same, ascending
        self._sums: list[float] | None = None  # of all from each on

    def ended(self, request: Request) -> None:
        """A request has ended, for whatever reason. Beams teach nothing: how long one lives says
        little of how long its search does."""
        if request.searches:
            return
        if len(self._recent) == KEPT:
            self._parts.remove(self._recent.popleft())
        part = len(request.output) / request.max_tokens
        self._recent.append(part)
        insort(self._parts, part)
        self._sums = None

    def to_come(self, request: Request) -> int:
        """Tokens that the request is expected to generate yet: what those have used, on average,
        that went on longer than it has."""
        done, most = request.num_scheduled_outputs, request.max_tokens
        total = float(max(UNKNOWN, 2 * done))
        if len(self._parts) >= ENOUGH:
            at = bisect_right(self._parts, done / most)
            total = (
                most * self._tails[at] / (len(self._parts) - at)
                if at < len(self._parts)
                else 2.0 * done
            )
        return max(1, min(most, round(total)) - done)

    def patience(self, tokens: int, rows: int, step_cost: int) -> float:
        """Steps that a request of so many tokens should run for, as one of `rows`, so that
        computing it again costs less than its rows bring. A step costs as much as `step_cost`
        tokens of a prompt."""
        return 1 + WORTH * tokens * rows / step_cost

    @property
    def _tails(self) -> list[float]:
        if self._sums is None:
            self._sums = list(accumulate(reversed(self._parts)))[::-1]
        return self._sums


def most(used: float, rows: int, page_size: int, horizon: float) -> float:
    """What `peak` is at most, whoever the `rows` requests are."""
    return used + rows * (max(0, horizon) + page_size) / page_size


def peak(used: float, shares: Iterable[Share], page_size: int, horizon: float) -> float:
    """The most pages that will be in use within `horizon` steps, when `used` are now and every
    running request grows a token a step until its end."""
    ascending = sorted(shares)
    alive, places, highest = (
        sum(share.grows for share in ascending),
        sum(share.places for share in ascending),
        float(used),
    )
    # Just before this one ends; a page is half full on average
    for share in ascending if horizon > 0 else ():
        when = min(share.to_come, horizon)
        highest = max(highest, used + (alive * (when + (page_size - 1) / 2) - places) / page_size)
        if share.to_come >= horizon:
            break
        used -= share.own
        alive -= share.grows
        places -= share.places
    return highest
