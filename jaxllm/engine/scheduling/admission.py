"""When a waiting request may start, by the pages that running requests will come to hold. Imports
no jax.

A request that is admitted too early is computed twice: once until it is preempted, and once again.
One that is admitted too late leaves rows of a step unused. So a request is admitted when everything
that runs is expected to fit the pool, for as many steps as the request's tokens are worth. The
lengths of finished requests tell how long others will become.
"""

from __future__ import annotations

import functools
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.kv_manager import AdmissionPages
from jaxllm.engine.scheduling.policy import RequestQueue
from jaxllm.engine.scheduling.request import Request

HISTORY = 256  # finished requests that the estimate is made from
MIN_HISTORY = 16  # of them before it is used
# Between 1 and 3 simulations differ little, be prompts or outputs long or short, known or not
RECOMPUTE_WEIGHT = 2.0
UNKNOWN_LENGTH = 2048  # tokens that an output is expected to have at most, before there is history


class PageDemand(NamedTuple):
    """What one request does to the pool.

    Attributes:
        steps: Tokens still to come.
        released: Pages that come back at its end.
        spare: Tokens that its pages have room for.
        grows: Whether it takes pages until then.
    """

    steps: int
    released: float
    spare: int
    grows: bool = True


class AdmissionEstimator:
    """Learns which share of `max_tokens` requests use, and admits by it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._shares: list[float] = []  # the same, ascending

    def record(self, request: Request) -> None:
        """Learn from a request that has ended, for whatever reason. Beams are left out: the life
        of a beam says little about its search."""
        if request.is_beam:
            return
        if len(self._recent) == HISTORY:
            self._shares.remove(self._recent.popleft())
        share = len(request.output) / request.max_tokens
        self._recent.append(share)
        insort(self._shares, share)
        self.__dict__.pop("_tail_sums", None)  # computed again when it is used

    def expected_tokens(self, request: Request) -> int:
        """Tokens that the request is expected to generate yet: the mean of finished requests that
        generated more than it has."""
        done = request.num_scheduled_outputs
        limit = request.max_tokens
        total = float(max(UNKNOWN_LENGTH, 2 * done))
        if len(self._shares) >= MIN_HISTORY:
            at = bisect_right(self._shares, done / limit)
            count = len(self._shares)
            if at < count:
                total = limit * self._tail_sums[at] / (count - at)
            else:
                total = 2.0 * done
        return max(1, min(limit, round(total)) - done)

    def worthwhile_steps(self, tokens: int, rows: int, step_cost: int) -> float:
        """Steps that a request of `tokens` tokens should run for as one of `rows`, so that
        computing it again costs less than its rows bring. A step costs as much as `step_cost`
        tokens of a prompt."""
        return 1 + RECOMPUTE_WEIGHT * tokens * rows / step_cost

    def fits(
        self,
        pools: Sequence[PagePool],
        running: RequestQueue,
        request: Request,
        pages: AdmissionPages,
        step_cost: int,
    ) -> bool:
        """Whether the request is expected to keep its pages for as long as it is worth, when it
        starts with these beside the `running` requests."""
        rows = len(running) + 1
        steps = self.worthwhile_steps(request.num_tokens, rows, step_cost)
        for group, pool in enumerate(pools):
            used = pool.num_pages - pool.free + pages.taken[group]
            size = pool.page_size
            if peak_bound(used, rows, size, steps) <= pool.num_pages:
                continue
            demands = self._demands(group, pool, running, request, pages)
            if peak(used, demands, size, steps) > pool.num_pages:
                return False
        return True

    def _demands(
        self,
        group: int,
        pool: PagePool,
        running: Iterable[Request],
        request: Request,
        pages: AdmissionPages,
    ) -> Iterator[PageDemand]:
        """What the running requests and this one do to the pool of a cache group."""
        size = pool.page_size
        limit = pool.lifetime.decode_bound(pool.page_size)
        for r in running:
            table = r.tables[group]
            own = len(table.pages) - max(table.found, table.out_of_window)
            spare = len(table.pages) * size - max(r.computed, r.prefill_end)
            demand = PageDemand(self.expected_tokens(r), own, spare)
            yield from bounded(demand, len(table.pages) - table.out_of_window, limit, size)
        table = pages.tables[group]
        fresh = pages.fresh[group]
        spare = (len(table.pages) + fresh) * size - request.num_tokens
        demand = PageDemand(self.expected_tokens(request), fresh, spare)
        yield from bounded(demand, len(table.pages) - table.out_of_window + fresh, limit, size)

    @functools.cached_property
    def _tail_sums(self) -> list[float]:
        """The sum of all shares from each on."""
        return list(accumulate(reversed(self._shares)))[::-1]


def bounded(
    demand: PageDemand, resident: int, limit: int | None, page_size: int
) -> Iterable[PageDemand]:
    """The demand of a request that holds `resident` pages, and at most `limit` while it decodes if
    there is a limit. It then grows for a while, and keeps what it has until its end."""
    if limit is None:
        return (demand,)
    # What is missing of a prompt goes to pages that the window gives back
    spare = max(0, demand.spare)
    growing = spare + max(0, limit - resident) * page_size
    if growing >= demand.steps:
        return (demand._replace(spare=spare),)
    grown = (growing + (page_size - 1) / 2 - spare) / page_size
    return (
        PageDemand(growing, -grown, spare),
        PageDemand(demand.steps, demand.released + grown, 0, grows=False),
    )


def peak_bound(used: float, rows: int, page_size: int, horizon: float) -> float:
    """An upper bound of `peak` for any `rows` requests."""
    return used + rows * (max(0, horizon) + page_size) / page_size


def peak(used: float, demands: Iterable[PageDemand], page_size: int, horizon: float) -> float:
    """The most pages in use within `horizon` steps, when `used` are now and every running request
    grows a token a step until its end."""
    ascending = sorted(demands)
    alive = sum(demand.grows for demand in ascending)
    spare = sum(demand.spare for demand in ascending)
    highest = float(used)
    # Just before this one ends; a page is half full on average
    for demand in ascending if horizon > 0 else ():
        when = min(demand.steps, horizon)
        highest = max(highest, used + (alive * (when + (page_size - 1) / 2) - spare) / page_size)
        if demand.steps >= horizon:
            break
        used -= demand.released
        alive -= demand.grows
        spare -= demand.spare
    return highest


def fits_fully(
    pools: Sequence[PagePool],
    running: Iterable[Request],
    request: Request,
    pages: AdmissionPages,
) -> bool:
    """Whether there are pages for all tokens that the `running` requests and this one may generate.

    Then none is ever preempted and computed again as a prompt, which batch-invariant engines must
    avoid. A choice may copy a page that it shares, and so counts one more.
    """
    for group, pool in enumerate(pools):
        left = pool.free - pages.taken[group]
        for r in (*running, request):
            if r is request:
                owned = len(pages.tables[group].pages) + pages.fresh[group]
            else:
                owned = len(r.tables[group].pages)
            total = pool.pages_for(len(r.prompt.tokens) + r.max_tokens) + (r.sharing is not None)
            left -= max(0, total - owned)
        if left < 0:
            return False
    return True
