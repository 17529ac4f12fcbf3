"""Take, per pass, the backend that was measured fastest for its size; over one cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from attn_core.costs.shapes import REPLAYED, PassPhase, form_of, forms, numbers, row_key
from attn_core.costs.table import Bucket, Table, table
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.routes import ROLE_OF_MODE, GroupRoutes, Pick, Route, ShadowRun
from attn_core.selection.result import Selection
from attn_core.spec.kinds import Role
from attn_core.spec.requirements import LayerRequirements

PHASES: Mapping[Role, PassPhase] = {"prefill": "prefill", "decode": "decode", "verify": "verify"}


class Planned(NamedTuple):
    """The plan of a pass and the route that it was made for."""

    route: Route
    metadata: Metadata


class GroupPlans(NamedTuple):
    """The plans of a pass whose groups of layers run on several backends."""

    routes: GroupRoutes
    plans: Mapping[Route, Planned]

    def of(self, layer_id: int) -> Planned:
        """Return the plan of a layer."""
        route = self.routes.by_layer.get(layer_id)
        return self.plans[self.routes.by_group[0][1] if route is None else route]


class Groups(NamedTuple):
    """The groups of equal layers of a model: their names, and layer id → index of its group."""

    names: tuple[str, ...] = ("all",)
    by_layer: Mapping[int, int] = {}

    @classmethod
    def of(cls, selection: Selection, layers: Iterable[AttentionLayer]) -> Groups:
        """Return the groups in the order of forms(), by which costs are known.

        A layer that the requirements do not list counts to the first group, as in GroupRoutes. What
        a backend does not support in it is refused when it first runs.
        """
        needs, page_size = selection.requirements, selection.page_size
        model_forms = forms(needs, page_size)
        by_layer = {}
        for x in layers:
            own = LayerRequirements.of(x, selection.roles["prefill"].row.kind)
            form = form_of(own, needs, page_size)
            same = (i for i, one in enumerate(model_forms) if one.distance(form) == 0)
            by_layer[x.layer_id] = next(same, 0)
        return cls(tuple(form.layer for form in model_forms), by_layer)


def shadowed(shadow: ShadowRun, own: Route, batch: ForwardBatch, metadata: Metadata) -> Metadata:
    """Return the plan of a pass, for the routes of its shadow if the shadow takes it.

    own: the route of a pass for which nothing was picked.
    """
    if type(metadata) is GroupPlans:
        taken = shadow.routes(metadata.routes.routes, batch)
        plans = {
            route: planned._replace(route=taken.get(route, route))
            for route, planned in metadata.plans.items()
        }
        return metadata._replace(plans=plans)
    route, plan = metadata if type(metadata) is Planned else (own, metadata)
    other = shadow.routes((route,), batch).get(route)
    return metadata if other is None else Planned(other, plan)


class Picker:
    """Picks among the admitted backends of a role by a table; the first is the chosen one.

    groups: of the layers, which the table may give to several backends.
    An eager pass stays with the backend of the pass before as long as that is at most 5 % slower,
    so that sizes at the edge of a bucket do not make it change from pass to pass.
    """

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        by_size: Table,
        role: Role = "decode",
        groups: Groups | None = None,
    ) -> None:
        names, by_layer = groups or Groups()
        self.backends = tuple(backends)
        every = [Route.of(b, role) for b in backends]
        mixed = (
            GroupRoutes(
                tuple((name, every[i]) for name, i in zip(names, pick, strict=True)),
                {layer: every[pick[group]] for layer, group in by_layer.items()},
            )
            for pick in by_size.mixed
        )
        self.routes: tuple[Pick, ...] = (*every, *mixed)
        self._cells, self._graphs, self._current = by_size.cells, by_size.graphs, 0
        self._queries = {queries for _, _, queries in by_size.cells}

    def pick(self, size: Bucket) -> Pick:
        """Return the route of an eager pass."""
        cell = self._cells.get(size)
        index = self._current
        if cell is None:
            index = 0
        elif not cell.near[index]:
            self._current = index = cell.best
        return self.routes[index]

    def captured(self, size: Bucket) -> Pick:
        """Return the route of a captured pass: for this many requests, whatever their lengths."""
        if size[2] not in self._queries:  # trees of another size than those that were measured
            return self.routes[0]
        return self.routes[self._graphs.get(size[0], 0)]

    def captured_at(self, size: Bucket) -> Pick:
        """Return the route of a captured pass that serves the lengths of one bucket alone."""
        cell = self._cells.get(size)
        return self.routes[0 if cell is None or cell.near[0] else cell.best]


class Pickers:
    """The pickers of the roles that have alternatives; a role without one has none to pick."""

    def __init__(self, by_role: Mapping[Role, Picker]) -> None:
        self.by_role = dict(by_role)
        roles = {mode: role for mode, role in ROLE_OF_MODE.items() if role in by_role}
        self._by_mode = {mode: self.by_role[role] for mode, role in roles.items()}

    @classmethod
    def of(
        cls,
        selection: Selection,
        backends: Mapping[Role, Sequence[AttentionBackend]],
        layers: Iterable[AttentionLayer] = (),
    ) -> Pickers:
        """Return pickers by what was measured.

        backends: role → the chosen backend, then those of its alternatives that were created.
        layers: of the model; those with equal needs are a group.
        """
        names = {role: [b.config.name for b in every] for role, every in backends.items()}
        alternatives = {
            role: tuple(c for c in others if c.backend in names[role][1:])
            for role, others in selection.alternatives.items()
        }
        by_role = tables(replace(selection, alternatives=alternatives))
        groups = Groups.of(selection, layers) if by_role else Groups()
        return cls({role: Picker(backends[role], x, role, groups) for role, x in by_role.items()})

    def items(self) -> list[tuple[Role, AttentionBackend]]:
        """Return role → backend, of all that may be picked."""
        return [(role, b) for role, p in self.by_role.items() for b in p.backends]

    def pick(self, mode: ForwardMode, size: Bucket) -> Pick | None:
        """Return the route of an eager pass, None where there is nothing to pick."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.pick(size)

    def captured(self, mode: ForwardMode, size: Bucket) -> Pick | None:
        """Return the route of a captured pass, None where there is nothing to pick."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.captured(size)

    def captured_at(self, mode: ForwardMode, size: Bucket) -> Pick | None:
        """Return the route of a captured pass that serves the lengths of one bucket alone."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.captured_at(size)

    def by_length(self, mode: ForwardMode, size: Bucket) -> list[Pick | None]:
        """Return the routes of captured passes of all lengths up to those of a bucket."""
        requests, longest, queries = size
        lengths = range(longest + 1)
        picks = (self.captured_at(mode, (requests, bits, queries)) for bits in lengths)
        return list(dict.fromkeys(picks))


def tables(selection: Selection) -> dict[Role, Table]:
    """Return the table of each role in which an alternative takes some pass."""
    measured = {role: _table(selection, role) for role, cs in selection.alternatives.items() if cs}
    return {
        role: by_size
        for role, by_size in measured.items()
        if by_size is not None and winners(by_size, 1 + len(selection.alternatives[role]))
    }


def winners(by_size: Table, count: int) -> set[int]:
    """Return which of so many candidates take passes of the chosen one, in all layers or some."""
    won = {cell.best for cell in by_size.cells.values() if not cell.near[0]}
    won |= {index for index in by_size.graphs.values() if index}
    return {i for pick in won for i in ((pick,) if pick < count else by_size.mixed[pick - count])}


def pruned(selection: Selection) -> Selection:
    """Return the selection without the alternatives that take no pass."""
    kept = {}
    for role, by_size in tables(selection).items():
        others = selection.alternatives[role]
        won = winners(by_size, 1 + len(others))
        kept[role] = tuple(c for i, c in enumerate(others, 1) if i in won)
    return selection if kept == selection.alternatives else replace(selection, alternatives=kept)


def digest(selection: Selection) -> str:
    """Return a digest of which backend takes which pass, "" where nothing is picked.

    It is equal on two ranks where they pick alike: picks depend on this and on numbers of requests,
    their longest length and their queries.
    """
    picks = [
        [
            role,
            [c.backend for c in (selection.roles[role], *selection.alternatives[role])],
            sorted(by_size.cells.items()),
            sorted(by_size.graphs.items()),
            *by_size.mixed,
        ]
        for role, by_size in tables(selection).items()
    ]
    return hashlib.sha256(repr(picks).encode()).hexdigest()[:12] if picks else ""


def _table(selection: Selection, role: Role) -> Table | None:
    """Return the table of a role, None without measured costs."""
    costs, needs = selection.costs, selection.requirements
    if costs is None:
        return None
    speculation = needs.speculation if role == "verify" else None
    phase = PHASES[role]
    choices = (selection.roles[role], *selection.alternatives[role])
    layers = numbers(needs, selection.page_size)
    known = [n for n in layers.values() if n is not None]
    return table(
        costs.model,
        [(c.backend, row_key(c.row), c.row.cuda_graph in REPLAYED[phase]) for c in choices],
        tuple(layers),
        phase,
        costs.workload,
        numbers=known if len(known) == len(layers) else (),
        drafts=speculation.num_draft_tokens if speculation else 0,
        tree=speculation is not None and speculation.topk > 1,
    )
