"""Choose few cases that show whatever all the cases show."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from itertools import combinations
from operator import or_


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

    def worth(i: int) -> float:
        return (bits[i] & missing).bit_count() / (cost[i] if cost else 1)

    while missing:
        chosen.append(max(range(len(bits)), key=worth))
        missing &= ~bits[chosen[-1]]
    for i in tuple(chosen):  # the first were chosen blindly
        others = reduce(or_, (bits[j] for j in chosen if j != i), 0)
        if not bits[i] & ~others:
            chosen.remove(i)
    return sorted(chosen)
