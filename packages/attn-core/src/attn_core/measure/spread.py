"""Passes that lie evenly over what serving runs, on logarithmic axes; torch-free."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence

from attn_core.costs.shapes import Form, Pass, PassPhase

POINTS, MOST_TRIES = 96, 1920  # of one form and phase
SHORTEST, LONGEST = 64, 32768  # KV tokens of a request
FEWEST_NEW = 16  # tokens of a chunk of a prompt
REQUESTS: dict[PassPhase, int] = {"prefill": 16, "decode": 256, "verify": 256}
SKEWED = LONGEST // 16  # the median length of requests that differ
SIGMAS = 0.75, 1.75  # the least and the greatest standard deviation of the logarithm of lengths
EVEN, WHOLE = 1 / 3, 0.4  # shares: passes of equal requests, whole prompts of a prefill
# Products of queries and keys, and numbers of K and V, of a pass that is still measured
MOST_WORK = {"cpu": 5e9}
MOST_NUMBERS = {"cpu": 1 << 25}
MOST_WORK_ELSEWHERE, MOST_NUMBERS_ELSEWHERE = 5e11, 1 << 32
BASES = (2, 3, 5, 7)  # of the Halton sequences of the axes


def spread(
    form: Form, phase: PassPhase, device_type: str, *, drafts: int = 0, tree: bool = False
) -> list[Pass]:
    """Return passes of one form, evenly over requests, lengths, their spread, and new tokens.

    Any first part of the list is even too. Other forms have other passes, so that forms fill each
    other's gaps. The same arguments give the same passes.
    """
    start = zlib.crc32(f"{form} {phase} {drafts} {tree}".encode()) % 100_000 + 1
    result: dict[Pass, None] = {}
    for k in range(start, start + MOST_TRIES):
        size = _pass(form, phase, [halton(k, base) for base in BASES], drafts, tree)
        if _measurable(form, size, device_type):
            result[size] = None
        if len(result) == POINTS:
            break
    return list(result)


def work(form: Form, size: Pass) -> float:
    """Return the products of queries and keys, with a floor that stands for launching."""
    queries, keys = size.queries / size.requests, size.kv_tokens / size.requests
    mean_visible = keys - (queries - 1) / 2
    if form.window is not None:
        mean_visible = min(mean_visible, form.window)
    return size.requests * queries * mean_visible * (form.q_heads or 1) * (form.head_dim or 1) + 1e6


def lengths(size: Pass) -> list[int]:
    """Return KV lengths of the requests of a pass, the longest first: log-normal, as they sum up.

    A pass of equal requests has equal lengths. No request has fewer tokens than new ones.
    """
    n, longest = size.requests, size.longest
    minimum = 1 if size.queries == size.kv_tokens else max(1, size.queries // n)
    if n == 1 or n * longest == size.kv_tokens:
        return [longest] * n
    low, high = 0.0, 64.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(_below(longest, n, middle, minimum)) > size.kv_tokens:
            low = middle
        else:
            high = middle
    result = _below(longest, n, high, minimum)
    missing = size.kv_tokens - sum(result)
    for i in range(1, n):  # what rounding left, and what no such lengths can sum up to
        added = min(missing, longest - result[i])
        result[i] += added
        missing -= added
    return result


def _below(longest: int, n: int, sigma: float, minimum: int) -> list[int]:
    z = _quantiles(n)
    return [max(min(minimum, longest), int(longest * math.exp(sigma * (x - z[0])))) for x in z]


def _quantiles(n: int) -> Sequence[float]:
    normal = statistics.NormalDist()
    return [normal.inv_cdf((n - i - 0.5) / n) for i in range(n)]


def _pass(form: Form, phase: PassPhase, point: Sequence[float], drafts: int, tree: bool) -> Pass:
    """Return the pass of a point of the unit cube."""
    n = _between(1, REQUESTS[phase], point[0])
    even = n == 1 or point[2] < EVEN
    median = _between(SHORTEST, LONGEST if even else SKEWED, point[1])
    new = {"decode": 1, "verify": drafts}.get(phase, 0)
    # a prompt of MLA without a prefix runs before absorption
    cached_share = 0.0 if form.kind == "mla" else WHOLE
    if phase == "prefill" and point[3] >= cached_share:
        new = _between(
            FEWEST_NEW, max(FEWEST_NEW, median // 2), (point[3] - cached_share) / (1 - cached_share)
        )
    keys = [median] * n
    if not even:
        low, high = SIGMAS
        sigma = low + (high - low) * (point[2] - EVEN) / (1 - EVEN)
        keys = [min(LONGEST, int(median * math.exp(sigma * z))) for z in _quantiles(n)]
    keys = [max(s, new, 1) for s in keys]
    return Pass(
        phase=phase,
        requests=n,
        kv_tokens=sum(keys),
        longest=max(keys),
        queries=n * new if new else sum(keys),
        drafts=drafts,
        tree=tree,
    )


def halton(k: int, base: int) -> float:
    """Return the digits of k behind the point: 6, in base 2 110, is 0.011."""
    value, unit = 0.0, 1.0
    while k:
        unit /= base
        k, digit = divmod(k, base)
        value += digit * unit
    return value


def _between(low: int, high: int, part: float) -> int:
    return round(low * math.pow(high / low, part))


def _measurable(form: Form, size: Pass, device_type: str) -> bool:
    width = (form.head_dim or 1) + (0 if form.kind == "mla" else form.v_head_dim or 1)
    numbers = size.kv_tokens * (form.kv_heads or 1) * width
    limit = MOST_WORK.get(device_type, MOST_WORK_ELSEWHERE)
    fits = numbers <= MOST_NUMBERS.get(device_type, MOST_NUMBERS_ELSEWHERE)
    return fits and work(form, size) <= limit
