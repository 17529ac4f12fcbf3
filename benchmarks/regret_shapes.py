"""The shapes that the choice of a backend is judged on: drawn, so that no tuning has seen them."""

from __future__ import annotations

import math
import random
from typing import TypeVar

import attn_core
from attn_core.costs.shapes import REPLAYED, Form, Pass, PassPhase

from benchmarks.cases import LATENT, ROPE, Case, Phase

_T = TypeVar("_T")
COUNT = 72
PHASES: tuple[Phase, ...] = (
    "prefill", "extend", "decode", "verify", "mla-extend", "mla", "mla-verify",
)  # fmt: skip
# (query heads, KV heads, head dim) of one rank, and how often; 32/8 of 128 is many of 7 to 9 B
HEADS = {(32, 8, 128): 4, (28, 4, 128): 1, (16, 2, 128): 1, (16, 16, 64): 1, (8, 4, 256): 1}
LATENT_HEADS = {16: 2, 32: 1, 128: 2}
PAGES = {64: 3, 16: 1, 1: 1}
SIGMAS: dict[float | None, int] = {None: 1, 1.0: 1, 1.5: 1}
LONGEST = {"cpu": 2048}  # tokens of a request; elsewhere
LONGEST_ELSEWHERE = 32768
# What the KV of one shape may take, and its work: a CPU needs a tenth of a second, a GPU 4 ms
MOST_KV_BYTES, MOST_FLOPS = {"cpu": 1 << 26}, {"cpu": 10**10}
MOST_KV_BYTES_ELSEWHERE, MOST_FLOPS_ELSEWHERE = 1 << 33, 2 * 10**12


def default_seed() -> str:
    """Return the seed of this release: another release is judged on other shapes."""
    return f"attn-core {attn_core.__version__}"


def draw(seed: str, device_type: str, count: int = COUNT) -> list[Case]:
    """Draw shapes, the phases in turns, so that a run that is cut short has seen all of them.

    Requests and lengths are log-uniform; of requests that differ, lengths are log-normal. The same
    seed draws the same shapes for the same type of device.
    """
    rng = random.Random(f"{seed} {device_type}")
    result: dict[str, Case] = {}
    while len(result) < count:
        case = _drawn(rng, PHASES[len(result) % len(PHASES)], device_type)
        small = case.kv_bytes <= MOST_KV_BYTES.get(device_type, MOST_KV_BYTES_ELSEWHERE)
        if small and case.flops <= MOST_FLOPS.get(device_type, MOST_FLOPS_ELSEWHERE):
            result.setdefault(case.name, case)
    return list(result.values())


def _drawn(rng: random.Random, phase: Phase, device_type: str) -> Case:
    longest = LONGEST.get(device_type, LONGEST_ELSEWHERE)
    few = phase in ("prefill", "extend", "mla-extend")
    batch = _log_uniform(rng, 1, 16 if few else 256)
    sigma = _weighted(rng, SIGMAS) if batch > 1 else None
    # a log-normal length is at most sixteen times its median
    length = _log_uniform(rng, 64, longest if sigma is None else longest // 16)
    queries: int | None = None if phase == "prefill" else 1
    if phase in ("extend", "mla-extend"):
        queries = _log_uniform(rng, 16, max(16, length // 2))
    elif phase in ("verify", "mla-verify"):
        queries = rng.randint(2, 8)
    if phase.startswith("mla"):
        q_heads, kv_heads, dim, v_dim = _weighted(rng, LATENT_HEADS), 1, LATENT + ROPE, LATENT
    else:
        q_heads, kv_heads, dim = _weighted(rng, HEADS)
        v_dim = dim
    return Case(
        phase=phase,
        batch=batch,
        length=max(length, queries or 1),
        queries=queries,
        sigma=sigma,
        tree=phase == "verify" and rng.random() < 0.5,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        page_size=64 if phase.startswith("mla") else _weighted(rng, PAGES),
    )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * math.pow(high / low, rng.random()))


def _weighted(rng: random.Random, weights: dict[_T, int]) -> _T:
    return rng.choices(list(weights), list(weights.values()))[0]


def form_of(case: Case) -> Form:
    """Return the form that costs of this case belong to."""
    return Form(
        kind=case.kind,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        store=case.kv_dtype,
    )


def pass_of(case: Case) -> Pass:
    """Return what a scheduler knows of this case: its sizes, with the true longest request."""
    phase: PassPhase = "verify" if case.phase.endswith("verify") else "decode"
    if case.phase.endswith(("prefill", "extend")):
        phase = "prefill"
    return Pass(
        phase=phase,
        requests=case.batch,
        kv_tokens=sum(case.seq_lens),
        longest=case.longest,
        queries=case.tokens,
        drafts=(case.queries or 0) if phase == "verify" else 0,
        tree=case.tree,
    )


def captured(case: Case) -> bool:
    """Say whether an engine replays such a pass in a CUDA graph."""
    return bool(REPLAYED[pass_of(case).phase])
