"""Choose few cases that show whatever all the cases show."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heapreplace
from itertools import combinations


def pairs(case: Mapping[str, Hashable]) -> Iterator[Hashable]:
    """Yield each value of a case's factors, and each pair of values of two factors."""
    yield from case.items()
    yield from map(frozenset, combinations(case.items(), 2))


def covering(shown: Sequence[AbstractSet[Hashable]], cost: Sequence[float] = ()) -> list[int]:
    """Return indices of cases that together show what all of them show.

    Greedy: again and again the case that shows the most that is new, per `cost` where it is given;
    of equals the first. Then those are left out that show nothing but what the others show.
    """
    numbers: dict[Hashable, int] = {}
    bits = [sum(1 << numbers.setdefault(x, len(numbers)) for x in items) for items in shown]
    missing = (1 << len(numbers)) - 1
    chosen: list[int] = []

    def loss(i: int) -> float:
        return -(bits[i] & missing).bit_count() / (cost[i] if cost else 1)

    heap = [(loss(i), i) for i in range(len(bits))]
    heapify(heap)
    while missing:
        before, i = heap[0]
        if (now := loss(i)) != before:  # less of it is new by now; of others it may be, too
            heapreplace(heap, (now, i))
            continue
        heappop(heap)
        chosen.append(i)
        missing &= ~bits[i]
    times = Counter(x for i in chosen for x in shown[i])
    for i in tuple(chosen):  # the first were chosen blindly
        if all(times[x] > 1 for x in shown[i]):
            times.subtract(shown[i])
            chosen.remove(i)
    return sorted(chosen)
