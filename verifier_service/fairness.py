"""Fair service between tenants: who was given less goes first.

Each tenant has a virtual counter of the rows that it was served. A tenant that comes back after a pause is lifted to
the least served of those who stayed: idleness saves up no claim, and who leaves and returns keeps his debt. After
Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with rows of forwards as the unit of work.
Pure: knows names and numbers, no sessions and no clock.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

MAX_REMEMBERED_TENANTS = 4096
"""Tenants without a session whose counters are kept."""

T = TypeVar("T")


class TenantShares:
    """How much each tenant was served. A tenant takes part while it has a session open, running or waiting."""

    def __init__(self) -> None:
        self._num_sessions: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._served_of_last_to_leave = 0.0

    def join(self, tenant: str) -> None:
        """A session of the tenant was opened."""
        self._num_sessions[tenant] += 1
        if tenant in self._served:
            return
        least = min(self._served.values(), default=self._served_of_last_to_leave)
        self._served[tenant] = max(self._absent.pop(tenant, 0.0), least)

    def leave(self, tenant: str) -> None:
        """A session of the tenant ended."""
        self._num_sessions[tenant] -= 1
        if self._num_sessions[tenant] > 0:
            return
        del self._num_sessions[tenant]
        self._served_of_last_to_leave = self._absent[tenant] = self._served.pop(tenant)
        if len(self._absent) > MAX_REMEMBERED_TENANTS:
            self._absent.popitem(last=False)

    def charge(self, tenant: str, num_rows: int) -> None:
        """The tenant was served so many rows. Does nothing for one whose last session ended meanwhile."""
        if tenant in self._served:
            self._served[tenant] += num_rows

    def served(self, tenant: str) -> float:
        """The tenant's counter; 0 for one that takes no part."""
        return self._served.get(tenant, 0.0)

    @property
    def num_tenants(self) -> int:
        """Tenants that take part."""
        return len(self._served)

    def by_turns(self, items: Mapping[str, Iterable[T]], num_rows: Callable[[T], float]) -> Iterator[T]:
        """The tenants' items, each tenant's in its own order, always next one of the tenant that was served least.

        What is handed out counts at once, in this iteration alone: `num_rows` is asked for an item after the caller has
        dealt with it. A tenant's next item is taken no sooner than its turn.
        """
        turns = [(self.served(tenant), order, iter(own)) for order, (tenant, own) in enumerate(items.items())]
        heapq.heapify(turns)
        while turns:
            served, order, own = turns[0]
            try:
                item = next(own)
            except StopIteration:
                heapq.heappop(turns)
                continue
            yield item
            heapq.heapreplace(turns, (served + num_rows(item), order, own))
