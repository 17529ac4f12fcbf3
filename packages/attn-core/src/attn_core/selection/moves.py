"""What moved between two locks, and why: a version, a row, a cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.costs.profile import Profile
from attn_core.errors import LockError
from attn_core.selection.expected import micros
from attn_core.selection.lock import BY_PASS, PLACES, Chosen, Lock, Place, Weighed


def require(lock: Lock, now: Lock, where: str = "the lock") -> list[str]:
    """Say what changed although the decision is the same. Raises LockError if it differs.

    where: what the error calls the lock.
    """
    requested, moved = differences(lock.asked, now.asked), moves(lock, now)
    changed = changes(lock, now)
    if not requested and not moved:
        return changed
    text = [f"the selection differs from {where}"]
    text += [f"asked: {difference}" for difference in requested]
    text += [line for move in moved for line in str(move).split("\n")]
    text += [f"changed: {difference}" for difference in changed]
    text.append("go back to what was locked, or accept this selection with `attn lock`")
    raise LockError("\n  ".join(text))


@dataclass(frozen=True)
class Move:
    """A part of the decision that is another now. then, now: None where it is absent."""

    what: str
    then: Chosen | None
    now: Chosen | None
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        sides = []
        for chosen in (self.then, self.now):
            reason = f" ({chosen.reason})" if chosen and chosen.reason else ""
            sides.append(f"{chosen.choice if chosen else 'nothing'}{reason}")
        return "\n".join([f"{self.what}: {' → '.join(sides)}", *(f"    {w}" for w in self.why)])

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        then, now = (None if c is None else c._asdict() for c in (self.then, self.now))
        return {"what": self.what, "then": then, "now": now, "why": list(self.why)}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say where two mappings differ; a name that only one has is a difference."""
    return Profile(environment=then).differences(now)


def changes(old: Lock, new: Lock) -> list[str]:
    """Say what differs in the environment and in the measured costs."""
    costs = [{"profile": x.profile} if x.profile else {} for x in (old, new)]
    return [*differences(old.environment, new.environment), *differences(*costs)]


def moves(old: Lock, new: Lock) -> list[Move]:
    """Return every part of the decision that is another, with what moved it."""
    result = []
    for what in dict.fromkeys((*old.decision, *new.decision)):
        then, now = old.decision.get(what), new.decision.get(what)
        if (then and then.choice) != (now and now.choice):
            result.append(Move(what, then, now, tuple(_causes(old, new, what, (then, now)))))
    return result


def _causes(old: Lock, new: Lock, what: str, sides: Iterable[Chosen | None]) -> Iterable[str]:
    """Say what changed of the two backends of a role: a row, a cost, a version, a conflict."""
    role = what.removeprefix(BY_PASS)
    if role not in PLACES:
        return
    parts = [part for c in sides if c for part in c.choice.split(", ")]
    names = list(dict.fromkeys(part.partition(" ")[0] for part in parts))
    libraries: set[str] = set()
    for name in names:
        place: Place = (*PLACES[role], name)
        then, now = old.weighed.get(place), new.weighed.get(place)
        yield from (f"{name} {text}" for text in _backend_changes(then, now))
        libraries |= {x for w in (then, now) if w for x in w.libraries}
    environments = ({n: v for n, v in x.environment.items() if n in libraries} for x in (old, new))
    yield from differences(*environments)
    for status, x, other in (("now", new, old), ("no longer", old, new)):
        for text in x.conflicts:
            if text not in other.conflicts and any(name in text for name in names):
                yield f"{status} in conflict: {text}"


def _backend_changes(then: Weighed | None, now: Weighed | None) -> Iterable[str]:
    if then is None or now is None:
        if then is not now:
            yield "was not declared" if then is None else "is not declared any more"
        return
    if then.refused != now.refused:
        if now.refused:
            yield f"does not fit: {'; '.join(now.refused)}"
        else:
            yield f"did not fit: {'; '.join(then.refused)}"
    if then.us != now.us:
        old_time, new_time = (
            "an unknown time" if x is None else micros(x) for x in (then.us, now.us)
        )
        yield f"took {old_time} and takes {new_time} per request and layer, by what was measured"
    if then.priority != now.priority:
        yield f"had priority {then.priority} and has {now.priority}"
    if then.row != now.row:
        yield f"has another row: {then.row} was {now.row}"
