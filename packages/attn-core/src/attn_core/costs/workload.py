"""A workload: the mix of passes that serving runs, by which costs of phases are added up."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from attn_core.costs.shapes import Pass, PassPhase
from attn_core.errors import UsageError
from attn_core.formatting import near, printable
from attn_core.json_text import loaded
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Speculation

MOST = 1 << 31
MOST_SHARES = 64
Mix = tuple[tuple[Pass, float], ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What requests look like, as shares of all requests; shares need not add up to 1.

    prompts: tokens of a prompt → share. requests: requests that decode together → share.
    output: tokens that a request generates. cached: the part of a prompt that is in the cache
    already, from 0 up to, and not including, 1. acceptance: tokens that one verification yields.
    Raises UsageError for a value outside of its range.
    """

    prompts: Mapping[int, float] = field(
        default_factory=lambda: {1024: 0.5, 4096: 0.35, 16384: 0.15}
    )
    requests: Mapping[int, float] = field(default_factory=lambda: {1: 0.2, 16: 0.4, 64: 0.4})
    output: int = 256
    cached: float = 0.0
    acceptance: float = 2.5

    def __post_init__(self) -> None:
        for name in ("prompts", "requests"):
            shares = getattr(self, name)
            whole = all(type(n) is int and 0 < n < MOST for n in shares)
            _need(0 < len(shares) <= MOST_SHARES and whole, name, shares, "numbers above 0 → share")
            numbers = all(_number(x) and 0 <= x < MOST for x in shares.values())
            _need(numbers and sum(shares.values()) > 0, name, shares, "shares of 0 or more")
        _need(type(self.output) is int and 0 < self.output < MOST, "output", self.output, "above 0")
        _need(_number(self.cached) and 0 <= self.cached < 1, "cached", self.cached, "0 to below 1")
        fits = _number(self.acceptance) and 1 <= self.acceptance < MOST
        _need(fits, "acceptance", self.acceptance, "1 or more tokens")

    def passes(self, phase: Phase, speculation: Speculation | None) -> Mix:
        """Return the passes of a phase, and how many of each one request takes a part of.

        A decode pass of 16 requests counts a sixteenth for each. Where a phase verifies, its
        decode passes are verifications.
        """
        verifies = speculation if speculation and speculation.mode == phase.value else None
        mix: list[tuple[Pass, float]] = []
        if phase is Phase.PREFILL:
            for prompt, share in _shares(self.prompts):
                new = max(1, round(prompt * (1 - self.cached)))
                mix.append((Pass.even("prefill", 1, prompt, new), share))
        if phase is Phase.DECODE or verifies:
            mix += self._steps(verifies)
        return tuple(mix)

    def batches(
        self, phase: PassPhase, requests: int, drafts: int = 0, *, tree: bool = False
    ) -> Mix:
        """Return the decode passes or verifications of so many requests, and their shares.

        Each request is in the middle of its output. One alone has each length in turn. Several have
        all lengths side by side, as their shares are.
        """
        shares = _shares(self.prompts)
        every = [(prompt + self.output // 2, share) for prompt, share in shares]
        if requests > 1:
            ends = list(itertools.accumulate(share for _, share in every))
            places = ((i + 0.5) / requests for i in range(requests))
            mixed = [every[min(bisect.bisect_left(ends, x), len(every) - 1)][0] for x in places]
            batches = [(mixed, 1.0)]
        else:
            batches = [([length], share) for length, share in every]
        mix: list[tuple[Pass, float]] = []
        for lengths, share in batches:
            whole = [max(n, drafts) for n in lengths]
            size = Pass(
                phase=phase,
                requests=requests,
                kv_tokens=sum(whole),
                longest=max(whole),
                queries=requests * max(drafts, 1),
                drafts=drafts,
                tree=tree,
            )
            mix.append((size, share))
        return tuple(mix)

    def _steps(self, verifies: Speculation | None) -> Mix:
        """Return decode passes or verifications, and how many of each one request takes part in."""
        drafts = verifies.num_draft_tokens if verifies else 0
        steps = self.output / (min(self.acceptance, drafts) if verifies else 1)
        tree = verifies is not None and verifies.topk > 1
        return tuple(
            (size, share * part * steps / n)
            for n, part in _shares(self.requests)
            for size, share in self.batches(
                "verify" if verifies else "decode", n, drafts, tree=tree
            )
        )

    @classmethod
    def from_json(cls, data: Any) -> Workload:
        """Return the workload of plain data. Raises UsageError, which names what is wrong."""
        known = [f.name for f in fields(cls)]
        if not isinstance(data, dict):
            raise UsageError(f"a workload is a JSON object of {', '.join(known)}")
        for name in data:
            if name not in known:
                unknown = printable(repr(name)[:80])
                raise UsageError(f"workload: unknown field {unknown}; {near(name, known)}")
        values = dict(data)
        for name in ("prompts", "requests"):
            if name in data:
                values[name] = _counts(name, data[name])
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Return the workload of JSON text. Raises UsageError."""
        try:
            data = loaded(text)
        except UsageError as error:
            raise UsageError(f"workload: {error}") from None
        return cls.from_json(data)


def _counts(name: str, data: Any) -> dict[int, float]:
    _need(isinstance(data, dict), name, data, 'an object such as {"1024": 0.5}')
    counts = {}
    for key, share in data.items():
        digits = key.isascii() and key.isdigit() and len(key) <= 10
        _need(digits, name, key, "a number above 0 as the key")
        counts[int(key)] = share
    return counts


def _shares(shares: Mapping[int, float]) -> list[tuple[int, float]]:
    total = sum(shares.values())
    return [(n, share / total) for n, share in sorted(shares.items()) if share > 0]


def _number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < MOST and math.isfinite(value)


def _need(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise UsageError(f"workload: {name} {printable(repr(value)[:80])} (expected {expected})")
