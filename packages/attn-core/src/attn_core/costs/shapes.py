"""What a cost belongs to: the form of a layer and its cache, and the size of a pass."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import GraphLevel
from attn_core.spec.requirements import LayerRequirements, Requirements

PassPhase = Literal["prefill", "decode", "verify"]
# The levels of CUDA graphs that replay passes of a phase; new prompts run in none
REPLAYED: Mapping[PassPhase, tuple[GraphLevel, ...]] = {
    "prefill": (),
    "decode": ("decode", "uniform", "always"),
    "verify": ("uniform", "always"),
}
PROSE = ("note", "preferred_page_reason", "bans", "priority", "create")  # change no kernel's time
# The nearest measured value stands for these; a doubling of heads changes more than one of pages.
NEAR = {
    "q_heads": 1.0,
    "kv_heads": 1.0,
    "head_dim": 0.5,
    "v_head_dim": 0.5,
    "window": 1.0,
    "page_size": 0.125,
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What does not change from pass to pass: a layer, its dtypes and the pages of its cache.

    Heads are one rank's. None in an asked form is unknown, and any measured value stands for it.
    """

    kind: str = "mha"
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    window: int | None = None
    logit_cap: bool = False
    sinks: bool = False
    dtype: str = "bf16"
    store: str = "bf16"
    page_size: int | None = None
    deterministic: bool = False

    def distance(self, measured: Form) -> float | None:
        """Return how far a measured form is, in doublings of heads; None: it says nothing here.

        The kind, dtypes and features have to agree. Of heads, head dims, pages and windows the
        nearest measured value stands for the asked one.
        """
        if (self.window is None) != (measured.window is None):
            return None
        far = 0.0
        for f in fields(self):
            own, have = getattr(self, f.name), getattr(measured, f.name)
            if own is None or own == have:
                continue
            if f.name not in NEAR or have is None:
                return None
            far += NEAR[f.name] * abs(math.log2(own / have))
        return far

    @property
    def layer(self) -> str:
        """The layer in words, without its cache: "64/8 heads of 64, window 128, sinks"."""
        return ", ".join([self._heads, *self._features])

    @property
    def _heads(self) -> str:
        dims = f"{self.head_dim}" + (
            f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        )
        return f"{self.q_heads}/{self.kv_heads} heads of {dims}"

    @property
    def _features(self) -> list[str]:
        parts = [f"window {self.window}"] * (self.window is not None)
        return parts + ["soft cap"] * self.logit_cap + ["sinks"] * self.sinks

    def __str__(self) -> str:
        parts = [self.kind, self._heads, self.store, *self._features]
        parts += [f"pages of {self.page_size}"] * (self.page_size is not None)
        parts += ["deterministic"] * self.deterministic
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The size of one pass: what a scheduler knows before it runs.

    kv_tokens: of all requests, new ones included. longest: the longest request. queries: of all
    requests. drafts: of each request that verifies; tree: they are a tree, not a chain.
    A prefill of fewer queries than KV tokens runs over a cached prefix.
    """

    phase: PassPhase
    requests: int
    kv_tokens: int
    longest: int
    queries: int
    drafts: int = 0
    tree: bool = False

    @classmethod
    def even(
        cls, phase: PassPhase, requests: int, length: int, queries: int = 1, *, tree: bool = False
    ) -> Pass:
        """Return a pass of equal requests: `length` KV tokens and `queries` of them new, each."""
        return cls(
            phase=phase,
            requests=requests,
            kv_tokens=requests * length,
            longest=length,
            queries=requests * queries,
            drafts=queries if phase == "verify" else 0,
            tree=tree,
        )

    @property
    def axes(self) -> tuple[float, float, float, float]:
        """Requests, mean length, longest, queries a request: more of any takes no less time."""
        n = self.requests
        return n, self.kv_tokens / n, self.longest, self.queries / n

    def __str__(self) -> str:
        n, mean, longest, queries = self.axes
        length = f"{mean:.0f}" if mean == longest else f"{mean:.0f} (longest {longest:.0f})"
        text = f"{self.phase} of {n:.0f} x {length}"
        if self.phase == "verify":
            return f"{text}, {'tree' if self.tree else 'chain'} of {self.drafts}"
        return text if self.phase == "decode" or queries == mean else f"{text}, {queries:.0f} new"


@functools.cache
def plain(form: Form) -> Form:
    """Return the form without what is an axis: heads, dims, pages, the window's size."""
    axes: dict[str, Any] = dict.fromkeys(NEAR)
    return replace(form, **axes | {"window": None if form.window is None else 1})


def row_key(row: Capabilities) -> str:
    """Return a short digest of what a row declares, its prose and its priority left out."""
    declared = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in PROSE}
    text = repr(
        {
            name: sorted(map(str, value)) if isinstance(value, frozenset) else value
            for name, value in declared.items()
        }
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def forms(needs: Requirements, page_size: int | None) -> tuple[Form, ...]:
    """Return the form of each distinct layer over the cache; () if one is of no measured kind."""
    return tuple(numbers(needs, page_size))


def numbers(needs: Requirements, page_size: int | None) -> dict[Form, int | None]:
    """Return form → how many layers have it, None where that is not known; as `forms`."""
    counts: dict[Form, int | None] = {}
    for layer in needs.softmax_layers if _measurable(needs) else ():
        form, n = form_of(layer, needs, page_size), layer.num_layers
        before = counts.get(form, 0)
        counts[form] = None if n is None or before is None else before + n
    return counts


def shares(needs: Requirements, page_size: int | None) -> dict[Form, float]:
    """Return form → its share of the layers; equal shares where one number is not known."""
    known = numbers(needs, page_size)
    counts = {form: n or 0 for form, n in known.items()}
    if not all(counts.values()):
        counts = dict.fromkeys(known, 1)
    return {form: n / sum(counts.values()) for form, n in counts.items()}


def _measurable(needs: Requirements) -> bool:
    """Say whether passes of these layers are of a kind that a profile may hold."""
    layers = needs.softmax_layers
    return bool(layers) and all(_plain(x) for x in layers)


def _plain(x: LayerRequirements) -> bool:
    return x.kind in ("mha", "mla") and not (x.encoder or x.cross or x.dual_chunk)


def form_of(x: LayerRequirements, needs: Requirements, page_size: int | None) -> Form:
    """Return the form of a softmax layer over the cache."""
    latent = x.kind == "mla"
    return Form(
        kind=x.kind,
        q_heads=x.num_q_heads,
        kv_heads=1 if latent else x.num_kv_heads,
        head_dim=x.head_dim,
        v_head_dim=x.v_head_dim or x.head_dim,
        window=x.sliding_window,
        logit_cap=x.logit_cap is not None,
        sinks=x.sinks,
        dtype=needs.dtype,
        store=needs.store_dtype,
        page_size=page_size,
        deterministic=needs.deterministic,
    )
