"""One decision for all ranks of a model: what one of them lacks, none of them uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import distributed

from attn_core.errors import AttnError, UsageError
from attn_core.runtime.adaptive import digest
from attn_core.selection.result import NoBackendError, Selection, Verdict, label

# Decide without the backends of these names: one rank's own decision, which may raise.
Decide = Callable[[Sequence[str]], Selection]
Fits = Mapping[tuple[str, str], str]  # (phase, backend) → why it does not fit, "" where it does

logger = logging.getLogger(__name__)


def agreed(decide: Decide, group: Any) -> Selection:
    """Decide on every rank of a process group, alike.

    A backend that fits on one rank and not on another is dropped on all, and rank 0 says so once.
    Then the ranks compare their decisions with that of rank 0, and the costs by which passes are
    switched. An error of one rank becomes one of all, so that none is left waiting.

    group: of torch.distributed, for objects of the host (gloo).
    Raises NoBackendError, UsageError, and what `decide` raises.
    """
    rank = distributed.get_rank(group)
    selection, error = _tried(decide, ())
    dropped = _dropped(_gather(None if selection is None else _fits(selection.verdicts), group))
    if dropped:
        selection, error = _tried(decide, list(dropped))
        if rank == 0:
            logger.warning("attn_core: %s", "; ".join(dropped.values()))
    answers = _gather(_error(error) if selection is None or error else decision(selection), group)
    if isinstance(error, NoBackendError) and dropped:
        reason = "; ".join(dropped.values())
        raise NoBackendError(f"{error}\n{reason}", error.selection)
    if selection is None or error is not None:
        assert error is not None
        raise error
    for other_rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise UsageError(f"rank {other_rank} cannot serve: {answer}")
        if answer != answers[0]:
            raise UsageError(
                f"rank 0 chose {answers[0]}, rank {other_rank} {answer}: give all ranks the same "
                "libraries, profiles and ATTN_* variables"
            )
    return selection


def united(names: frozenset[str], group: Any) -> frozenset[str]:
    """Return the names that any rank of a process group gives; None: there is no other rank."""
    return names if group is None else frozenset().union(*_gather(names, group))


def decision(selection: Selection) -> dict[str, str]:
    """Return what ranks have to have in common, as words: roles, pool, costs, picks of passes.

    Picks depend on nothing else but the numbers of a pass that are equal on all ranks: requests,
    the longest length that the host knows, queries.
    """
    result = {label(role): choice.backend for role, choice in selection.roles.items()}
    for role, alternatives in selection.alternatives.items():
        result[f"{label(role)} by pass"] = ", ".join(choice.backend for choice in alternatives)
    if selection.page_size is not None:
        pool = (selection.page_size, selection.kv_cache_dtype, selection.layout)
        result["pool"] = ", ".join(map(str, pool))
    if selection.alternatives and selection.costs is not None:
        result["profile"] = selection.costs.model.profile.digest
        result["picks"] = digest(selection)
    return result


def _tried(decide: Decide, without: Sequence[str]) -> tuple[Selection | None, AttnError | None]:
    """Return a decision and its error; of a decision that found nothing, both."""
    try:
        return decide(without), None
    except NoBackendError as error:
        return error.selection, error
    except AttnError as error:
        return None, error


def _error(error: AttnError | None) -> str:
    return f"{type(error).__name__}: {error}"


def _fits(verdicts: Iterable[Verdict]) -> Fits:
    """Return why each backend does not fit a phase, "" where it fits."""
    return {
        (f"{v.spec.family} {v.phase.value}", v.spec.name): "; ".join(map(str, v.reasons))
        for v in verdicts
    }


def _dropped(all_fits: Sequence[Fits | None]) -> dict[str, str]:
    """Return backend → why no rank uses it, of those that fit on some ranks only."""
    ranks = {rank: fits for rank, fits in enumerate(all_fits) if fits is not None}
    dropped: dict[str, str] = {}
    for phase, name in sorted({place for fits in ranks.values() for place in fits}):
        # a rank that judged the phase at all; another has no such layers
        serving = {r: fits for r, fits in ranks.items() if any(p == phase for p, _ in fits)}
        reasons = {r: fits.get((phase, name), "not installed") for r, fits in serving.items()}
        missing = {r: reason for r, reason in reasons.items() if reason}
        if missing and len(missing) < len(reasons):
            rank, reason = next(iter(missing.items()))
            dropped.setdefault(name, f"no rank uses {name}: rank {rank} lacks it ({reason})")
    return dropped


def _gather(mine: Any, group: Any) -> list[Any]:
    """Return the objects of all ranks, in their order."""
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, mine, group=group)
    return gathered
