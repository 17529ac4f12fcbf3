"""A random serving session: requests come, grow, branch, share a prefix and leave, in any mode."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import OutOfPagesError
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Phase
from attn_core.testing.case_catalog import random_tree, renamed
from attn_core.testing.cases import Case, Parents
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.oracle import attend_request
from attn_core.testing.passes import returned
from attn_core.testing.sequences import Request, Step
from attn_core.testing.server import Server
from attn_core.testing.tolerance import CheckFailed, Measure, within_budget, worst

M = ForwardMode
DRAFTS, LONGEST, MOST_REQUESTS = 4, 150, 8
_PHASE = {M.EXTEND: Phase.PREFILL, M.MIXED: Phase.PREFILL, M.DECODE: Phase.DECODE}


def session_cells(row: Capabilities, store: str) -> frozenset[str]:
    """Return the cells of the matrix that a session on this row is evidence for."""
    covers = {
        "page_sizes": True,
        "sliding_window": row.sliding_window,
        "sinks": row.sinks,
        "logit_cap": row.logit_cap,
        "lse": row.lse,
        "spec_topk1": _drafts(row) >= 1,
        "spec_topk_gt1": _drafts(row) > 1,
        "fp8_kv": store.startswith("fp8"),
    }
    return frozenset(cell for cell, is_it in covers.items() if is_it)


def _drafts(row: Capabilities) -> int:
    return (
        row.max_verify_topk
        if row.max_session_topk is None
        else min(row.max_verify_topk, row.max_session_topk)
    )


def run_session(
    bench: Bench, case: Case, point: Point, store: str, *, passes: int, seed: int = 0
) -> Measure:
    """Drive `passes` passes of mixed modes over one cache; compare each with the oracle.

    case gives heads and dims. Two layers, the second with everything that the row declares:
    window (in a view of its own, whose pages behind the window are given back), sinks, soft cap.
    Modes of a phase that the row does not serve only write their tokens.
    """
    session = _Session(bench, case, point, store, random.Random(seed))
    for number in range(passes):
        session.step(number)
    return session.verdict()


def run_two_sessions(bench: Bench, case: Case, point: Point, store: str, *, passes: int) -> Measure:
    """Drive two sessions in two threads, each over its own dispatcher and pool.

    The threads meet after each plan and each layer, so that one plans and runs between the other's
    plan and its layers.
    """
    meet = threading.Barrier(2)

    def pause() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other thread has ended
            meet.wait()

    def drive(session: _Session) -> Measure:
        try:
            with torch.no_grad():  # a thread has its own mode
                for number in range(passes):
                    session.step(number)
        finally:
            meet.abort()
        return session.verdict()

    rngs = [random.Random(seed) for seed in (1, 2)]
    sessions = [_Session(bench, case, point, store, rng, pause) for rng in rngs]
    with ThreadPoolExecutor(len(sessions)) as threads:
        return worst(list(threads.map(drive, sessions)))


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """A pass that is about to run: per request its new tokens, and the trees of a verify pass."""

    mode: ForwardMode
    requests: Sequence[Request]
    news: Sequence[int]
    trees: Sequence[Parents] | None = None


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a pass returned, and what is right."""

    place: str
    actual: Tensor
    truth: Tensor
    baseline: Tensor


_NUMBERS = ("actual", "truth", "baseline")


def _error(actual: Tensor, truth: Tensor) -> float:
    return (actual.double() - truth).abs().nan_to_num(nan=torch.inf).max().item()


class _Session:
    def __init__(
        self,
        bench: Bench,
        case: Case,
        point: Point,
        store: str,
        rng: random.Random,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        row = bench.row
        self._row, self._rng, self._point, self._pause = row, rng, point, pause
        self._rounds = bench.rounds(store)
        self._server = Server(
            bench,
            replace(case, kv_dtype=store),
            point,
            drafts=DRAFTS,
            max_bs=2 * MOST_REQUESTS + 4,
            longest=2 * LONGEST,
            rng=rng,
        )
        self._seen: dict[str, list[_Seen]] = {}  # layer and what → passes
        self._modes = [M.EXTEND, M.EXTEND, M.DECODE, M.DECODE, M.MIXED, M.IDLE]
        if _drafts(row) >= 1:
            self._modes += [M.TARGET_VERIFY, M.TARGET_VERIFY, M.DRAFT_DECODE, M.DRAFT_EXTEND]

    def step(self, number: int) -> None:
        """Run one pass; room is made by ending requests."""
        server, rng = self._server, self._rng
        mode = rng.choice(self._modes)
        if server.requests and (rng.random() < 0.1 or len(server.requests) >= MOST_REQUESTS):
            server.release(rng.choice(server.requests))
        for request in [r for r in server.requests if r.length > LONGEST]:
            server.release(request)
        while True:
            planned = self._wish(mode)
            try:
                return self._run(planned, f"pass {number} ({planned.mode.value})")
            except OutOfPagesError:
                for request in planned.requests:  # those that only began, and branches
                    if not request.length or request not in server.requests:
                        server.release(request)
                if server.requests:
                    server.release(rng.choice(server.requests))

    def verdict(self) -> Measure:
        """Compare all that was seen; one pass has too few numbers for a budget of its own."""
        errors = []
        for name, records in self._seen.items():
            rounding = torch.float32 if name.endswith("LSE") else TORCH_DTYPES[self._point.dtype]
            actual, truth, baseline = (
                torch.cat([getattr(s, x) for s in records]) for x in _NUMBERS
            )
            try:
                errors.append(within_budget(name, actual, truth, baseline, rounding))
            except CheckFailed as error:
                first = max(records, key=lambda s: _error(s.actual, s.truth))
                raise CheckFailed(f"{error}; worst in {first.place}") from error
        return worst(errors)

    def _wish(self, mode: ForwardMode) -> _Wish:
        server, rng = self._server, self._rng
        if mode is M.IDLE:
            return _Wish(mode=mode, requests=(), news=())
        if not server.requests or mode is M.EXTEND:
            existing = rng.sample(server.requests, min(1, len(server.requests)))
            chosen = [*existing, *(server.begin() for _ in range(rng.randint(1, 2)))]
            return _Wish(mode=M.EXTEND, requests=chosen, news=[rng.randint(1, 40) for _ in chosen])
        chosen = rng.sample(server.requests, rng.randint(1, len(server.requests)))
        if mode is M.DRAFT_DECODE and _drafts(self._row) > 1:
            forks = [f for r in chosen[:3] for f in (server.fork(r), server.fork(r)) if f]
            chosen = forks or chosen
        if mode is M.TARGET_VERIFY:
            trees = None
            if _drafts(self._row) > 1 and rng.random() < 0.7:
                trees = [self._tree() for _ in chosen]
            return _Wish(mode=mode, requests=chosen, news=[DRAFTS] * len(chosen), trees=trees)
        longest = {M.MIXED: 20, M.DRAFT_EXTEND: 3}.get(mode, 1)
        query_lens = [rng.randint(1, longest) if rng.random() < 0.5 else 1 for _ in chosen]
        return _Wish(mode=mode, requests=chosen, news=query_lens)

    def _tree(self) -> Parents:
        seed = self._rng.randrange(1 << 30)
        return renamed(random_tree(DRAFTS, seed), seed)

    def _run(self, planned: _Wish, place: str) -> None:
        server, rng = self._server, self._rng
        phase_served = _PHASE.get(planned.mode) in (None, *self._row.phases)
        step = server.prepare(
            planned.mode,
            planned.requests,
            planned.news,
            trees=planned.trees,
            padding=rng.randint(1, 3) if rng.random() < 0.3 and planned.requests else 0,
        )
        metadata = server.dispatcher.init_forward_metadata(step.batch) if phase_served else None
        self._pause()
        for index, layer in enumerate(server.layers):
            if not phase_served:
                server.write(step, index)
                server.record(step, index)
                continue
            return_lse = self._row.lse and rng.random() < 0.5
            q = step.q[index]
            actual = server.dispatcher.forward(
                q, step.k[index], step.v[index], layer, step.batch, metadata, return_lse=return_lse
            )
            self._pause()
            shape = (step.batch.num_tokens, layer.num_q_heads, layer.v_head_dim)
            try:
                out, lse = returned(actual, shape, q.dtype, out=None, return_lse=return_lse)
            except CheckFailed as error:
                raise CheckFailed(f"{place}, layer {index}: {error}") from error
            server.record(step, index)
            if planned.requests:
                self._note(step, index, place, out, lse)
        self._settle(planned)

    def _note(self, step: Step, index: int, place: str, out: Tensor, lse: Tensor | None) -> None:
        """Keep some tokens of each request, the last and one more, beside what is right."""
        layer, start, rows = self._server.layers[index], 0, []
        truths: list[tuple[Tensor, Tensor]] = []
        baselines: list[tuple[Tensor, Tensor]] = []
        for b, (request, n) in enumerate(zip(step.requests, step.news, strict=True)):
            picked = sorted({n - 1, self._rng.randrange(n)})
            rows += [start + i for i in picked]
            kinds = (
                (torch.float64, truths, None),
                (TORCH_DTYPES[self._point.dtype], baselines, self._rounds),
            )
            for exact, outputs, rounds in kinds:
                outputs.append(
                    attend_request(
                        step.q[index][start : start + n].cpu(),
                        request.keys[index],
                        request.values[index],
                        dtype=exact,
                        causal=True,
                        scale=layer.scale,
                        window=layer.sliding_window,
                        parents=step.trees[b] if step.trees else None,
                        logit_cap=layer.logit_cap,
                        sinks=None if layer.sinks is None else layer.sinks.cpu(),
                        queries=picked,
                        rounds=rounds,
                    )
                )
            start += n
        for i, (name, actual) in enumerate((("output", out), ("LSE", lse))):
            if actual is not None:
                truth, baseline = (torch.cat([pair[i] for pair in a]) for a in (truths, baselines))
                record = _Seen(place, actual[rows].detach().cpu(), truth, baseline)
                self._seen.setdefault(f"layer {index}, {name}", []).append(record)

    def _settle(self, planned: _Wish) -> None:
        """Keep the accepted drafts, end the branches, give back what lies behind the window."""
        server, rng = self._server, self._rng
        for b, request in enumerate(planned.requests):
            if planned.mode is M.TARGET_VERIFY:
                parents = planned.trees[b] if planned.trees else tuple(range(-1, DRAFTS - 1))
                path: list[int] = []
                node = rng.randrange(-1, DRAFTS)
                while node >= 0:
                    path.insert(0, node)
                    node = parents[node]
                server.keep(request, DRAFTS, path)
            if request not in server.requests:
                server.release(request)
            else:
                server.forget_window(request)
