"""The backends that may take over single passes, over the cache of the chosen pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attn_core.selection.ranking import RowJudge
from attn_core.selection.result import Choice, Selection, Verdict
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Phase, Role
from attn_core.spec.page_size import takes_page

Conflict = Callable[[RowJudge, Verdict, Verdict], str | None]
_LEVELS = ("never", "decode", "uniform", "always")
_DEMANDS = ("needs_host_lengths",)  # on the engine that serves the rows
_OFFERS = ("lse", "tensor_scales", "chunked_prefix")  # to it


def with_alternatives(
    s: RowJudge,
    selection: Selection,
    pre: Verdict,
    dec: Verdict,
    fitting: dict[Phase, list[Verdict]],
    conflict: Conflict,
) -> Selection:
    """Return the selection with the backends that a dispatcher may take pass by pass.

    They were measured, run on the chosen pages and layout, ask no more of the engine than the
    chosen rows, offer it no less than that of their phase, and get along with every other backend
    that is admitted. Finite padding is nothing more: caches of engines that pick are finite. A
    phase has none if a name or a preference decided it, in deterministic mode, and if it has no
    costs.
    """
    if s.needs.deterministic or Phase.DECODE not in fitting:
        return selection
    able: dict[Phase, list[Verdict]] = {Phase.PREFILL: [pre], Phase.DECODE: [dec]}
    for phase, chosen in ((Phase.PREFILL, pre), (Phase.DECODE, dec)):
        if _decided(s, chosen):
            continue
        other = able[Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL]
        for v in fitting[phase]:
            taken = any(v.spec.name == x.spec.name for x in able[phase])
            if taken or not _admissible(selection, v, chosen):
                continue
            pairs = ((v, x) if phase is Phase.PREFILL else (x, v) for x in other)
            if not any(conflict(s, *pair) for pair in pairs):
                able[phase].append(v)
    roles: dict[Role, list[Verdict]] = {
        "prefill": able[Phase.PREFILL],
        "decode": able[Phase.DECODE],
    }
    speculation = s.needs.speculation
    if speculation is not None:
        roles["verify"] = roles[speculation.mode]
    alternatives = {
        role: tuple(
            Choice(v.spec.name, v.row, "measured fastest of this pass") for v in verdicts[1:]
        )
        for role, verdicts in roles.items()
        if len(verdicts) > 1
    }
    return replace(selection, alternatives=alternatives, costs=s.costs)


def _decided(s: RowJudge, chosen: Verdict) -> bool:
    """Say whether the caller decided this phase, or nothing was measured."""
    name = chosen.spec.name
    return (
        chosen.expected is None
        or s.named("softmax", chosen.phase) is not None
        or name in s.overrides.prefer
    )


def _admissible(selection: Selection, v: Verdict, chosen: Verdict) -> bool:
    """Say whether a row that fits may take passes of the chosen one, over the same cache."""
    row, own = v.row, chosen.row
    rows = [c.row for c in selection.roles.values()]  # what one asks for, the engine does for all
    return (
        v.expected is not None
        and v.spec.creator(row) is not None
        and (row.absorbed, row.fused_kv_write) == (own.absorbed, own.fused_kv_write)
        and selection.layout in row.layouts
        and takes_page(replace(row, layouts={selection.layout}), selection.page_size or 1)
        and _demands_no_more(row, own, rows)
    )


def _demands_no_more(row: Capabilities, own: Capabilities, rows: Sequence[Capabilities]) -> bool:
    more = any(getattr(row, n) and not any(getattr(x, n) for x in rows) for n in _DEMANDS)
    less = any(getattr(own, name) and not getattr(row, name) for name in _OFFERS)
    graphs = _LEVELS.index(row.cuda_graph) >= _LEVELS.index(own.cuda_graph)
    return not more and not less and graphs
