"""Take, per pass, the backend that was measured fastest for its size; over one cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from attn_core.costs.shapes import REPLAYED, PassPhase, forms, row_key
from attn_core.costs.table import Bucket, Table, table
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.routes import ROLE_OF_MODE, Route, ShadowRun
from attn_core.selection.result import Selection
from attn_core.spec.kinds import Role

PHASES: Mapping[Role, PassPhase] = {"prefill": "prefill", "decode": "decode", "verify": "verify"}


class Planned(NamedTuple):
    """The plan of a pass and the route that it was made for."""

    route: Route
    metadata: Metadata


def shadowed(shadow: ShadowRun, own: Route, batch: ForwardBatch, metadata: Metadata) -> Metadata:
    """Return the plan of a pass, for the route of its shadow if the shadow takes it.

    own: the route of a pass for which nothing was picked.
    """
    route, plan = metadata if type(metadata) is Planned else (own, metadata)
    other = shadow.route(route, batch)
    return metadata if other is None else Planned(other, plan)


class Picker:
    """Picks among the admitted backends of a role by a table; the first is the chosen one.

    An eager pass stays with the backend of the pass before as long as that is at most 5 % slower,
    so that sizes at the edge of a bucket do not make it change from pass to pass.
    """

    def __init__(
        self, backends: Sequence[AttentionBackend], by_size: Table, role: Role = "decode"
    ) -> None:
        self.routes = tuple(Route.of(b, role) for b in backends)
        self._cells, self._graphs, self._current = by_size.cells, by_size.graphs, 0
        self._queries = {queries for _, _, queries in by_size.cells}

    def pick(self, size: Bucket) -> Route:
        """Return the route of an eager pass."""
        cell = self._cells.get(size)
        index = self._current
        if cell is None:
            index = 0
        elif not cell.near[index]:
            self._current = index = cell.best
        return self.routes[index]

    def captured(self, size: Bucket) -> Route:
        """Return the route of a captured pass: for this many requests, whatever their lengths."""
        if size[2] not in self._queries:  # trees of another size than those that were measured
            return self.routes[0]
        return self.routes[self._graphs.get(size[0], 0)]

    def captured_at(self, size: Bucket) -> Route:
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
        cls, selection: Selection, backends: Mapping[Role, Sequence[AttentionBackend]]
    ) -> Pickers:
        """Return pickers by what was measured.

        backends: role → the chosen backend, then those of its alternatives that were created.
        """
        names = {role: [b.config.name for b in every] for role, every in backends.items()}
        alternatives = {
            role: tuple(c for c in others if c.backend in names[role][1:])
            for role, others in selection.alternatives.items()
        }
        made = tables(replace(selection, alternatives=alternatives))
        return cls({role: Picker(backends[role], found, role) for role, found in made.items()})

    def items(self) -> list[tuple[Role, AttentionBackend]]:
        """Return role → backend, of all that may be picked."""
        return [(role, r.backend) for role, p in self.by_role.items() for r in p.routes]

    def pick(self, mode: ForwardMode, size: Bucket) -> Route | None:
        """Return the route of an eager pass, None where there is nothing to pick."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.pick(size)

    def captured(self, mode: ForwardMode, size: Bucket) -> Route | None:
        """Return the route of a captured pass, None where there is nothing to pick."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.captured(size)

    def captured_at(self, mode: ForwardMode, size: Bucket) -> Route | None:
        """Return the route of a captured pass that serves the lengths of one bucket alone."""
        picker = self._by_mode.get(mode)
        return None if picker is None else picker.captured_at(size)

    def by_length(self, mode: ForwardMode, size: Bucket) -> list[Route | None]:
        """Return the routes of captured passes of all lengths up to those of a bucket."""
        requests, longest, queries = size
        lengths = range(longest + 1)
        found = (self.captured_at(mode, (requests, bits, queries)) for bits in lengths)
        return list(dict.fromkeys(found))


def tables(selection: Selection) -> dict[Role, Table]:
    """Return the table of each role in which an alternative takes some pass."""
    found = {role: _table(selection, role) for role, cs in selection.alternatives.items() if cs}
    return {role: made for role, made in found.items() if made is not None and winners(made)}


def winners(made: Table) -> set[int]:
    """Return which candidates take passes of the chosen one, by their indexes in a table."""
    won = {cell.best for cell in made.cells.values() if not cell.near[0]}
    return won | {index for index in made.graphs.values() if index}


def pruned(selection: Selection) -> Selection:
    """Return the selection without the alternatives that take no pass."""
    kept = {}
    for role, made in tables(selection).items():
        others = enumerate(selection.alternatives[role], 1)
        kept[role] = tuple(c for i, c in others if i in winners(made))
    return selection if kept == selection.alternatives else replace(selection, alternatives=kept)


def digest(selection: Selection) -> str:
    """Return a digest of which backend takes which pass, "" where nothing is picked.

    It is equal on two ranks where they pick alike: picks depend on this and on numbers of requests,
    their longest length and their queries.
    """
    said = [
        [
            role,
            [c.backend for c in (selection.roles[role], *selection.alternatives[role])],
            sorted(made.cells.items()),
            sorted(made.graphs.items()),
        ]
        for role, made in tables(selection).items()
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12] if said else ""


def _table(selection: Selection, role: Role) -> Table | None:
    """Return the table of a role, None without measured costs."""
    costs, needs = selection.costs, selection.requirements
    if costs is None:
        return None
    speculation = needs.speculation if role == "verify" else None
    phase = PHASES[role]
    choices = (selection.roles[role], *selection.alternatives[role])
    return table(
        costs.model,
        [(c.backend, row_key(c.row), c.row.cuda_graph in REPLAYED[phase]) for c in choices],
        forms(needs, selection.page_size),
        phase,
        costs.workload,
        drafts=speculation.num_draft_tokens if speculation else 0,
        tree=speculation is not None and speculation.topk > 1,
    )
