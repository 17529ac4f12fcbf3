"""The joint selection over all phases, a pure function that keeps every reason."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from attn_core.costs.model import CostModel
from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.advice import advice, runs_today
from attn_core.selection.alternatives import with_alternatives
from attn_core.selection.checks import check_flags, check_types
from attn_core.selection.expected import Costs
from attn_core.selection.ranking import (
    RowJudge,
    best_per_backend,
    nothing_fits,
    shipped_profile,
)
from attn_core.selection.result import (
    Choice,
    NoBackendError,
    Overrides,
    Selection,
    Verdict,
    role_of,
)
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase, Role
from attn_core.spec.page_size import page_limit, sharing, smallest_page, takes_page
from attn_core.spec.requirements import Requirements


def select(
    requirements: Requirements,
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides | None = None,
    profile: Profile | None = None,
    *,
    workload: Workload | None = None,
    simulated: bool = False,
    advise: bool = True,
) -> Selection:
    """Select a backend for every role, all phases together. Pure and torch-free.

    libraries: distribution → version; None means new enough.
    profile: measured costs, which rank before priorities. None takes what a plugin ships for this
    device, Profile() takes nothing.
    workload: the mix of passes that costs are weighed by; None takes Workload().
    simulated: the device is not this machine's, so a backend that is declared but not implemented
    may be selected, with a note.
    advise: also determine what runs today, and which flag avoids what is slow.

    Raises NoBackendError, which carries the Selection with every verdict; UnknownBackendError for
    an undeclared name; UsageError for a flag that has no effect and for a value of another type.
    """
    check_types(requirements, device, registry, libraries, overrides, profile, workload)
    overrides = _canonical(overrides or Overrides(), registry)
    if profile is None:
        profile, refused = shipped_profile(device, registry, libraries)
        if refused:
            assumed = (*requirements.assumptions, refused)
            requirements = replace(requirements, assumptions=assumed)
    costs = Costs(CostModel(profile), workload or Workload(), requirements)
    s = RowJudge(requirements, device, registry, libraries, overrides, costs, simulated)
    check_flags(s)
    chosen = _solve(s)
    if not advise:
        return chosen
    return replace(
        chosen, runs_today=runs_today(s, chosen, _solve), advice=advice(s, chosen, _solve)
    )


def _solve(s: RowJudge) -> Selection:
    base = Selection(
        requirements=s.needs,
        kv_cache_dtype=s.needs.store_dtype,
        device=s.device,
        assumptions=s.needs.assumptions,
    )
    return _solve_linear(s, _solve_vision(s, _solve_softmax(s, base)))


def _canonical(overrides: Overrides, registry: Registry) -> Overrides:
    """Replace aliases in the lists by names. Raises UnknownBackendError."""

    def names(listed: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(registry.find(name).name for name in listed))

    return replace(
        overrides,
        prefer=names(overrides.prefer),
        allow=None if overrides.allow is None else names(overrides.allow),
        deny=names(overrides.deny),
    )


def _solve_softmax(s: RowJudge, base: Selection) -> Selection:
    if not s.needs.softmax_layers:
        return base  # nothing to attend with: no cache, no backend
    phases = [Phase.PREFILL, Phase.DECODE]
    if all(x.encoder for x in s.needs.softmax_layers):
        if s.overrides.decode_attention_backend is not None:
            raise UsageError("--decode-attention-backend: the model has no layers that decode")
        phases.remove(Phase.DECODE)
    weighed = {p: s.weigh("softmax", p) for p in phases}
    verdicts = best_per_backend(tuple(itertools.chain(*weighed.values())), s)
    base = replace(base, verdicts=verdicts)
    fitting = {p: s.candidates(w, "softmax") for p, w in weighed.items()}
    for phase, options in fitting.items():
        if not options:
            raise NoBackendError(nothing_fits(s, verdicts, phase), base)
    dearest = {
        p: max((v.expected.us for v in o if v.expected), default=0.0) for p, o in fitting.items()
    }
    pairs = {
        (
            *_joint_rank(s, pre, dec, dearest),
            (pre.row is not dec.row, pre.spec.name, dec.spec.name, i),
        ): (
            pre,
            dec,
        )
        for i, (pre, dec) in enumerate(
            itertools.product(fitting[Phase.PREFILL], fitting[Phase.DECODE])
            if Phase.DECODE in fitting
            else ((v, v) for v in fitting[Phase.PREFILL])
        )
    }
    conflicts: dict[tuple[str, str], str] = {}  # pairs that rank before the chosen one
    for key in sorted(pairs):
        pre, dec = pairs[key]
        problem = _conflict(s, pre, dec)
        if problem is None:
            break
        conflicts.setdefault((pre.spec.name, dec.spec.name), problem)
    else:
        raise NoBackendError(
            "no pair of backends can share one cache: "
            + "; ".join(conflicts.values())
            + "; name another backend for one phase",
            replace(base, conflicts=tuple(conflicts.values())),
        )
    conflicts.pop((pre.spec.name, dec.spec.name), None)  # other rows of the same two
    base = replace(base, conflicts=tuple(conflicts.values()))
    page, page_reason = _page(s, pre, dec)
    roles: dict[Role, Choice] = {
        "prefill": _choice(pre, s.reason(pre, "softmax", fitting[Phase.PREFILL])),
        "decode": _choice(dec, s.reason(dec, "softmax", fitting.get(Phase.DECODE, ()))),
    }
    if Phase.DECODE not in fitting:
        roles["decode"] = _choice(dec, "the model does not decode: as prefill")
    if s.needs.speculation is not None:
        mode = s.needs.speculation.mode
        verifier = replace(roles[mode], reason=f"--speculative-attention-mode {mode}")
        roles["verify"] = roles["draft"] = verifier
    selection = replace(
        base,
        roles=roles,
        page_size=page,
        page_size_reason=page_reason,
        layout=sorted(pre.row.layouts & dec.row.layouts, key=lambda x: (x != "NHD", x))[0],
    )
    return with_alternatives(s, selection, pre, dec, fitting, _conflict)


def _joint_rank(
    s: RowJudge, pre: Verdict, dec: Verdict, dearest: Mapping[Phase, float]
) -> tuple[float, ...]:
    """Rank a pair: the sum of both, whose expected costs are those on the pages that they share.

    dearest: the highest expected cost of each phase. A phase that was not measured counts as this,
    so that pairs that lack different phases are compared by what the other one saves.
    """
    if pre.expected is None or dec.expected is None or _conflict(s, pre, dec):
        both = pre, dec
    else:
        page = _page(s, pre, dec)[0]
        both = s.on_pages(pre, page), s.on_pages(dec, page)
    ranks = (s.rank(v, dearest[v.phase]) for v in both)
    return tuple(a + b for a, b in zip(*ranks, strict=True))


def _choice(chosen: Verdict, reason: str) -> Choice:
    return Choice(chosen.spec.name, chosen.row, reason, chosen.notes)


def _conflict(s: RowJudge, pre: Verdict, dec: Verdict) -> str | None:
    """Say why two rows that fit alone cannot share a cache, None where they can."""
    pair = f"{pre.spec.name} (prefill) with {dec.spec.name} (decode)"
    ban = pre.row.bans.get(dec.spec.name) or dec.row.bans.get(pre.spec.name)
    if ban:
        return f"{pair}: {ban}"
    if not pre.row.layouts & dec.row.layouts:
        return f"{pair}: no common KV layout ({set(pre.row.layouts)} and {set(dec.row.layouts)})"
    limit = page_limit(s.needs)
    page = s.needs.page_size or smallest_page((pre.row, dec.row), limit)
    if page is None or not all(takes_page(row, page) for row in sharing((pre.row, dec.row))):
        limits = ", ".join(
            f"{v.spec.name} takes {sorted(v.row.page_sizes) or 'any'}"
            + (f" up to {v.row.max_page_size}" if v.row.max_page_size else "")
            for v in (pre, dec)
        )
        return f"{pair}: no common page size ({limits})"
    return None


def _page(s: RowJudge, pre: Verdict, dec: Verdict) -> tuple[int, str]:
    rows = sharing((pre.row, dec.row))
    if s.needs.page_size is not None:
        return s.needs.page_size, "named by --page-size"
    limit = page_limit(s.needs)
    smallest = smallest_page(rows, limit) or 1
    for v in (dec, pre):
        page = v.row.preferred_page_size
        able = page and not limit % page and all(takes_page(row, page) for row in rows)
        if page and able and page != smallest:
            return page, (
                f"{v.spec.name} prefers {page} to {smallest}: {v.row.preferred_page_reason}; a "
                f"cached prefix is then reused in whole pages of {page} tokens"
            )
    return smallest, "the smallest that every chosen row takes (best prefix reuse)"


def _solve_vision(s: RowJudge, base: Selection) -> Selection:
    if s.needs.vision is None:
        return base
    weighed = s.weigh("softmax", Phase.ENCODE)
    verdicts = best_per_backend(weighed, s)
    base = replace(base, verdicts=base.verdicts + verdicts)
    options = s.candidates(weighed, "softmax")
    if not options:
        problem = nothing_fits(s, verdicts, Phase.ENCODE)
        if s.overrides.mm_attention_backend:
            raise NoBackendError(problem, base)
        kept = f"the vision tower keeps the model's own attention: {problem}"
        return replace(base, assumptions=(*base.assumptions, kept))
    best = options[0]
    return replace(base, roles={**base.roles, "encode": _choice(best, s.reason(best, "softmax"))})


def _solve_linear(s: RowJudge, base: Selection) -> Selection:
    if not s.needs.linear_layers:
        return base
    best: dict[str, Verdict] = {}
    problems = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        weighed = s.weigh("linear", phase)
        verdicts = best_per_backend(weighed, s)
        base = replace(base, verdicts=base.verdicts + verdicts)
        options = s.candidates(weighed, "linear")
        if options:
            best[phase.value] = options[0]
        else:
            problems.append(nothing_fits(s, verdicts, phase))
    o = s.overrides
    named = (o.linear_attn_backend, o.linear_attn_prefill_backend, o.linear_attn_decode_backend)
    if problems and any(named):  # a name is honoured, or all of it is refused
        raise NoBackendError("; ".join(problems), base)
    verifier = None
    if s.needs.speculation is not None:
        verifier = _linear_verifier(s, base, best)
    if problems:
        kept = f"the model keeps its own linear attention layers: {'; '.join(problems)}"
        return replace(base, assumptions=(*base.assumptions, kept))
    roles: dict[Role, Choice] = {
        role_of("linear", v.phase): _choice(v, s.reason(v, "linear")) for v in best.values()
    }
    if verifier is not None:
        roles["linear_verify"] = verifier
    return replace(base, roles={**base.roles, **roles})


def _linear_verifier(s: RowJudge, base: Selection, best: Mapping[str, Verdict]) -> Choice:
    """Choose who verifies drafts in linear layers: the decode kernels where they can.

    A model's own layers cannot: nobody takes their state back to the accepted draft.
    """
    topk = s.needs.speculation.topk if s.needs.speculation is not None else 0
    able = [v for v in s.weigh("linear", Phase.DECODE) if v.fits and v.row.max_verify_topk >= topk]
    if len(best) < 2 or not able:
        raise NoBackendError(
            f"no linear backend verifies topk {topk} on {s.device}, and the state of the model's "
            "own linear layers cannot be taken back to the accepted draft; run without speculation",
            base,
        )
    decode = best["decode"].spec.name
    chosen = min(able, key=lambda v: (v.spec.name != decode, s.rank(v), v.spec.name))
    name, row = chosen.spec.name, chosen.row
    why = f"{decode} does not verify topk {topk}; highest priority of those that do"
    why = "the backend of linear decode" if name == decode else f"{why} ({row.priority})"
    return Choice(name, row, why)
