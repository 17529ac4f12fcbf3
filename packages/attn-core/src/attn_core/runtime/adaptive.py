"""Take, per pass, the backend that was measured fastest for its size; over one cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attn_core.costs.shapes import PassPhase, forms, row_key
from attn_core.costs.table import Bucket, Table, bucket_of, table
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch
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

    A pass stays with the backend of the pass before as long as that is at most 5 % slower, so that
    sizes at the edge of a bucket do not make it change from pass to pass. A pick reads numbers of
    the host alone. counts: (bucket, backend) → passes.
    """

    def __init__(self, backends: Sequence[AttentionBackend], by_size: Table) -> None:
        self.routes = tuple(Route(b, b.forward, not b.config.row.fused_kv_write) for b in backends)
        self._cells, self._graphs, self._current = by_size.cells, by_size.graphs, 0
        self.counts: Counter[tuple[Bucket, str]] = Counter()

    def pick(self, batch: ForwardBatch) -> Route:
        """Return the route of an eager pass."""
        view = batch.views.get("full")
        longest = 0 if view is None else view.max_seq_len
        bucket = bucket_of(batch.batch_size, longest, batch.num_tokens)
        cell = self._cells.get(bucket)
        index = self._current
        if cell is None:
            index = 0
        elif not cell.near[index]:
            self._current = index = cell.best
        route = self.routes[index]
        self.counts[bucket, route.backend.config.name] += 1
        return route

    def captured(self, batch: ForwardBatch) -> Route:
        """Return the route of a captured pass: for this many requests, whatever their lengths."""
        return self.routes[self._graphs.get(batch.batch_size.bit_length(), 0)]


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

        backends: role → the chosen backend, then its alternatives in the selection's order.
        """
        made = {
            role: Picker(every, found)
            for role, every in backends.items()
            if len(every) > 1 and (found := _table(selection, role)) is not None
        }
        return cls(made)

    def items(self) -> list[tuple[Role, AttentionBackend]]:
        """Return role → backend, of all that may be picked."""
        return [(role, r.backend) for role, p in self.by_role.items() for r in p.routes]

    def pick(self, batch: ForwardBatch) -> Route | None:
        """Return the route of an eager pass, None where there is nothing to pick."""
        picker = self._by_mode.get(batch.forward_mode)
        return None if picker is None else picker.pick(batch)

    def captured(self, batch: ForwardBatch) -> Route | None:
        """Return the route of a captured pass, None where there is nothing to pick."""
        picker = self._by_mode.get(batch.forward_mode)
        return None if picker is None else picker.captured(batch)

    def counts(self) -> dict[Role, dict[tuple[Bucket, str], int]]:
        """Return role → (bucket, backend) → how many eager passes it had."""
        return {role: dict(picker.counts) for role, picker in self.by_role.items()}


def _table(selection: Selection, role: Role) -> Table | None:
    """Return the table of a role; None where the chosen backend is fastest everywhere."""
    costs, needs = selection.costs, selection.requirements
    if costs is None:
        return None
    speculation = needs.speculation if role == "verify" else None
    graphs = role == "decode" or (speculation is not None and speculation.mode == "decode")
    choices = (selection.roles[role], *selection.alternatives[role])
    made = table(
        costs.model,
        [(c.backend, row_key(c.row), graphs and c.row.cuda_graph != "never") for c in choices],
        forms(needs, selection.page_size),
        PHASES[role],
        costs.workload.lengths(),
        drafts=speculation.num_draft_tokens if speculation else 0,
        tree=speculation is not None and speculation.topk > 1,
    )
    faster = any(cell.best for cell in made.cells.values()) or any(made.graphs.values())
    return made if faster else None
