"""Search for the cheapest fixes that get a backend selected; each is tried and necessary."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

from attn_core.errors import AttnError
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import Registry
from attn_core.selection.compatibility import mismatches
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.mismatch import Fix, FixCost, Mismatch
from attn_core.selection.result import NoBackendError, Selection, role_of
from attn_core.selection.sub_backends import sub_backend_gaps
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.kinds import Phase

MAX_EXPLORED = 1000  # situations that the search looks at before it gives up
NEAREST = 2  # backends of the other phase that it tries to bring about, where none fits it
# What is asked after some fixes, None where that cannot be asked.
Apply = Callable[[tuple[Fix, ...]], SelectionInputs | None]


@dataclass(frozen=True)
class Goal:
    """Phases that a backend may serve, and the fixes that this begins with.

    cost: what the goal costs beside its fixes; a goal that answers less of the question is dear.
    """

    phases: tuple[Phase, ...]
    start: tuple[Fix, ...] = ()
    cost: int = 0


@dataclass(frozen=True)
class Search:
    """Uniform-cost search over fixes, from what is asked to where `spec` serves.

    torch: the version beside which libraries are installed, None where it is unknown.
    """

    spec: BackendSpec
    registry: Registry
    apply: Apply
    torch: str | None = None

    def run(self, goals: Iterable[Goal]) -> tuple[tuple[Fix, ...], SelectionInputs] | None:
        """Return the cheapest fixes that reach one of the goals, and what is then asked."""
        tie = itertools.count()
        queue: list[tuple[int, int, Goal, tuple[Capabilities, ...], tuple[Fix, ...]]] = []

        def push(goal: Goal, rows: tuple[Capabilities, ...], fixes: tuple[Fix, ...]) -> None:
            cost = goal.cost + sum(c.cost for c in fixes)
            heapq.heappush(queue, (cost, next(tie), goal, rows, fixes))

        for goal in goals:
            for rows in _row_sets(self.spec, goal.phases):
                push(goal, rows, goal.start)
        explored: set[tuple[int, tuple[int, ...], frozenset[Fix]]] = set()
        failed: dict[tuple[int, frozenset[Fix]], tuple[Fix, ...]] = {}
        for _ in range(MAX_EXPLORED):
            if not queue:
                return None
            _, _, goal, rows, fixes = heapq.heappop(queue)
            state = (id(goal), frozenset(fixes))
            key = (state[0], tuple(map(id, rows)), state[1])
            inputs = None if key in explored else self.apply(fixes)
            explored.add(key)
            if inputs is None:
                continue
            gaps = self._gaps(inputs, rows, goal.phases)
            if gaps:
                options = self._options(gaps[0], inputs)
            elif state in failed:
                options = failed[state]
            else:
                result = self._select(inputs)
                if self._is_selected(result, goal):
                    return self._minimal_fixes(goal, fixes, result)
                options = failed[state] = tuple(_other_fixes(inputs, goal, result))
            for option in options:
                push(goal, rows, _with_fix(fixes, option))
        return None

    def _select(self, inputs: SelectionInputs) -> Selection | NoBackendError | None:
        """Select; return the refusal where nothing fits, None where nothing can be asked."""
        try:
            return inputs.select(self.registry, advise=False)
        except NoBackendError as error:
            return error
        except AttnError:
            return None

    def _is_selected(self, result: Selection | NoBackendError | None, goal: Goal) -> bool:
        if not isinstance(result, Selection):
            return False
        roles = (role_of(self.spec.family, phase) for phase in goal.phases)
        return all(result.backend(role) == self.spec.name for role in roles)

    def _fixed_inputs(self, goal: Goal, fixes: tuple[Fix, ...]) -> SelectionInputs | None:
        inputs = self.apply(fixes)
        return inputs if inputs and self._is_selected(self._select(inputs), goal) else None

    def _minimal_fixes(
        self, goal: Goal, fixes: tuple[Fix, ...], result: Selection | NoBackendError | None
    ) -> tuple[tuple[Fix, ...], SelectionInputs] | None:
        """Leave out the fixes that others make superfluous, the dearest first."""
        for fix in sorted(fixes, key=lambda c: -c.cost):
            remaining = tuple(c for c in fixes if c is not fix)
            if self._fixed_inputs(goal, remaining):
                return self._minimal_fixes(goal, remaining, result)
        page = result.page_size if isinstance(result, Selection) else None
        paged = tuple(_page(c, page) for c in fixes)
        for smallest in (paged, fixes):
            inputs = self._fixed_inputs(goal, smallest)
            if inputs is not None:
                return smallest, inputs
        return None

    def _gaps(
        self, inputs: SelectionInputs, rows: tuple[Capabilities, ...], phases: tuple[Phase, ...]
    ) -> list[Mismatch]:
        speculation = inputs.requirements.speculation
        mode = speculation.mode if speculation and self.spec.family == "softmax" else None
        needs, device, libraries = inputs.requirements, inputs.device, inputs.libraries
        gaps = [
            gap
            for row, phase in zip(rows, phases, strict=True)
            for gap in mismatches(
                row, needs, device, libraries, phase, speculates=mode == phase.value
            )
        ]
        elsewhere = any(g.need == "device" for g in gaps)
        if not all(map(self.spec.creator, rows)) and not inputs.simulated and not elsewhere:
            gaps.insert(0, Mismatch("implementation", self.spec.name, "not implemented in 0.1"))
        o, name = inputs.overrides, self.spec.name
        if o.allow is not None and name not in o.allow:
            fix = _override(f"add {name} to --allow", FixCost.NAME, allow=(*o.allow, name))
            gaps.append(Mismatch("allow", name, "--allow lacks it", (fix,)))
        if name in o.deny:
            remaining = tuple(d for d in o.deny if d != name)
            fix = _override(f"take {name} from --deny", FixCost.NAME, deny=remaining)
            gaps.append(Mismatch("deny", name, "--deny has it", (fix,)))
        # the fewest ways out first: a gap that nothing closes ends the branch at once
        for row, phase in zip(rows, phases, strict=True):
            gaps.extend(sub_backend_gaps(row, phase, o))
        return sorted(dict.fromkeys(gaps), key=lambda g: len(g.fixes))

    def _options(self, gap: Mismatch, inputs: SelectionInputs) -> tuple[Fix, ...]:
        """Return the fixes that close a gap; of libraries those that can be installed first."""
        if gap.need != "library":
            return gap.fixes
        requirements = alternatives(gap.supported.removeprefix("needs "))
        fixes = []
        for fix, library in zip(gap.fixes, requirements, strict=True):
            pins = [p for p in self.registry.pins if p.distribution == library.name]
            fitting = [p for p in pins if p.accepts(library) and p.loads(self.torch)]
            installable = next((p for p in fitting if p.pip), None)
            if installable is not None:
                text = fix.text if inputs.simulated else installable.pip
                fixes.append(replace(fix, text=text))
            elif not pins:
                text = fix.text if inputs.simulated else f"pip install '{library}'"
                fixes.append(replace(fix, text=text))
            elif any(not p.indexed for p in pins):
                reason = next(p.why for p in pins if not p.indexed)
                fixes.append(replace(fix, cost=FixCost.INSTALL + 2, text=f"{fix.text}: {reason}"))
            else:
                torch_versions = " or ".join(
                    dict.fromkeys(p.torch for p in pins if p.accepts(library))
                )
                text = f"{fix.text} beside torch{torch_versions}" if self.torch else fix.text
                fixes.append(replace(fix, cost=FixCost.INSTALL + 1, text=text))
        return tuple(fixes)


def _row_sets(spec: BackendSpec, phases: tuple[Phase, ...]) -> Iterator[tuple[Capabilities, ...]]:
    """Yield a row per phase; rows of two kinds or two devices never serve together."""
    row_lists = [[r for r in spec.capabilities if p in r.phases] for p in phases]
    for rows in itertools.product(*row_lists):
        first = rows[0]
        if all(
            r.kind == first.kind
            and (r.device == first.device or "any" in (r.device, first.device))
            and (not r.archs or not first.archs or r.archs & first.archs)
            for r in rows
        ):
            yield rows


def _with_fix(fixes: tuple[Fix, ...], option: Fix) -> tuple[Fix, ...]:
    """Add a fix; one that it overwrites is left out."""
    new = {name for name, _ in option.values}
    remaining = (c for c in fixes if c.target != option.target or {n for n, _ in c.values} - new)
    return (*remaining, option)


def _override(text: str, cost: int, **values: object) -> Fix:
    return Fix("overrides", tuple(values.items()), cost, text)


def _other_fixes(
    inputs: SelectionInputs, goal: Goal, result: Selection | NoBackendError | None
) -> Iterator[Fix]:
    """Yield what may help where the backend fits alone, and the selection fails all the same.

    A page size that no pair shares, drafts that no linear backend verifies, a flag of the caller
    that names another backend or leaves none to the other phase, or what the other phase lacks.
    """
    if isinstance(result, Selection):
        return  # it is possible, and others rank before the backend
    if inputs.requirements.page_size is not None:
        free = (("page_size", None),)
        yield Fix("requirements", free, FixCost.FLAG, "no --page-size")
    if inputs.requirements.speculation is not None:  # linear layers that nobody verifies
        without = (("speculation", None),)
        yield Fix("requirements", without, FixCost.FEATURE + 1, "no speculation")
    added_names = {name for fix in goal.start for name, _ in fix.values}
    for field in fields(inputs.overrides):
        value = getattr(inputs.overrides, field.name)
        if value not in (None, ()) and field.name not in added_names and field.name != "prefer":
            yield drop(field.name, value)
    verdicts = result.selection.verdicts if result is not None else ()
    fitting_phases = {v.phase for v in verdicts if v.fits}
    missing = [v for v in verdicts if v.phase not in fitting_phases and v.phase not in goal.phases]
    for verdict in sorted(missing, key=lambda v: (len(v.reasons), v.cost))[:NEAREST]:
        for reason in verdict.reasons:
            yield from (c for c in reason.fixes if c.target not in ("device", "overrides"))


def drop(field: str, value: object) -> Fix:
    """Return the fix that takes a flag of the caller back."""
    text = ",".join(value) if isinstance(value, tuple) else value
    empty = () if field in ("prefer", "deny") else None
    return _override(f"no --{field.replace('_', '-')} {text}", FixCost.FLAG, **{field: empty})


def _page(fix: Fix, page: int | None) -> Fix:
    """Put the page size that was chosen in the place of "no --page-size"."""
    if fix.values != (("page_size", None),) or page is None:
        return fix
    return replace(fix, values=(("page_size", page),), text=f"--page-size {page}")
