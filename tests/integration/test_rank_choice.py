"""Ranks choose alike: what one of them lacks none uses, and an error of one is one of all."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from attn_core import AttnError, LayerRequirements, Requirements
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form
from attn_core.costs.workload import Workload
from attn_core.integrations import choice
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.kinds import Phase
from ranks import on_ranks

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
NEEDS = Requirements(layers=(LayerRequirements(**HEADS),), dtype="fp32", page_size=1)
BEST, NEXT = "torch_native", "flex_attention"  # by priority, for float32 on a CPU


def without(name: str) -> Registry:
    """Return what is installed on a rank where one plugin is missing."""
    result = load_plugins()
    rest = {key: spec for key, spec in result.backends.items() if key[1] != name}
    return replace(result, backends=rest)


def measured(us: dict[str, float]) -> Profile:
    """Return a profile: backend → µs of every pass."""
    form = Form(q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, dtype="fp32", store="fp32",
                page_size=1)  # fmt: skip
    costs = {
        Key(name, "", form, size): Cost(value, value, value, 0.0)
        for name, value in us.items()
        for phase in (Phase.PREFILL, Phase.DECODE)
        for size, _ in Workload().passes(phase, None)
    }
    return Profile(costs=costs)


def chosen(rank: int, size: int, case: str) -> tuple[Any, list[str]]:
    """Choose on one rank, of which the last differs as the case says: a decision and what was said.

    The decision of a rank that fails is its error.
    """
    last, said = rank == size - 1, []
    handler = logging.Handler()
    handler.emit = lambda r: said.append(r.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("attn_core.integrations.ranks")
    logger.handlers = [handler]
    names = {"ATTN_DENY": "intel_amx"}  # which is the best where there is AMX
    names |= {"ATTN_ATTENTION_BACKEND": BEST} if case in NAMED else {}
    registry, profile = load_plugins(), None
    if last and case in ("missing", "named"):
        registry = without(BEST)
    if last and case in ("refused", "denied"):
        names["ATTN_DENY"] += "," + BEST
    if last and case == "wrong":
        names["ATTN_SHARED_PREFIX"] = "yes"
    if case == "profile":
        profile = measured({BEST: 1.0, NEXT: 2.0 if last else 0.9})
    with (
        mock.patch.dict("os.environ", names),
        mock.patch.object(choice, "load_plugins", return_value=registry),
        mock.patch.object(choice.store, "tuned_profile", return_value=profile),
    ):
        try:
            device = torch.device("cpu")
            result, _ = choice.choose(NEEDS, device, ranks=dist.group.WORLD)
        except AttnError as error:
            return f"{type(error).__name__}: {error}", said
    return {role: x.backend for role, x in result.roles.items()}, said


def every(rank: int, size: int) -> dict[str, tuple[Any, list[str]]]:
    return {case: chosen(rank, size, case) for case in ("alike", *CASES)}


NAMED = ("named", "denied")
CASES = ("missing", "refused", *NAMED, "wrong", "profile")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, tuple[Any, list[str]]]]:
    """What each of two and of four ranks chose and said."""
    return on_ranks(request.param, every)


def test_ranks_that_are_alike_say_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["alike"] == ({"prefill": BEST, "decode": BEST}, [])


@pytest.mark.parametrize(
    ("case", "why"), [("missing", "not installed"), ("refused", f"{BEST} (--deny")]
)
def test_what_one_rank_lacks_none_uses_and_one_says_so(
    ranks: list[dict[str, Any]], case: str, why: str
) -> None:
    for number, rank in enumerate(ranks):
        result, said = rank[case]
        assert result == {"prefill": NEXT, "decode": NEXT}
        assert len(said) == (number == 0)
    [text] = ranks[0][case][1]
    assert f"no rank uses {BEST}: rank {len(ranks) - 1} lacks it ({why}" in text


def test_a_named_backend_is_not_replaced(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert f"unknown backend '{BEST}'" in rank["named"][0]
        assert f"rank {len(ranks) - 1} lacks it ({BEST} (--deny has it" in rank["denied"][0]


def test_an_error_of_one_rank_is_one_of_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[-1]["wrong"][0].startswith("UsageError: ATTN_SHARED_PREFIX=yes")
    for rank in ranks[:-1]:
        result = rank["wrong"][0]
        assert result.startswith(f"UsageError: rank {len(ranks) - 1} cannot serve: UsageError")


def test_ranks_with_other_profiles_stop(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["profile"][0].startswith("UsageError: rank 0 chose")
