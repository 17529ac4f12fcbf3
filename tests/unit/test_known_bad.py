"""A combination that a plugin knows to be bad is avoided, and its source is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.plugins.validation import problem
from attn_core.selection.diagnosis import why_not
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities, KnownBad
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements

NEEDS = Requirements(layers=(LayerRequirements(num_q_heads=4, num_kv_heads=4, head_dim=64),))
PLAIN = {"kind": "mha", "device": "acme", "dtypes": {"bf16"}, "kv_dtypes": {"bf16"}}
ROW = Capabilities(**PLAIN, priority=30, requires=["fastlib>=2 or otherlib"])
SLOW = BackendSpec(name="slow", capabilities=[Capabilities(**PLAIN, priority=10)], create="x:Y")
BAD = KnownBad(why="its answers are wrong", source="acme/fastlib#12")
WHERE = Device("acme", "a1")


def chosen(bad, libraries, needs=NEEDS, **options):
    fast = BackendSpec(name="fast", capabilities=[ROW], create="x:Y", known_bad=[bad])
    registry = Registry({("softmax", s.name): s for s in (fast, SLOW)})
    found = select(needs, WHERE, registry, libraries, Overrides(**options))
    said = {str(r) for v in found.verdicts if v.spec.name == "fast" for r in v.reasons}
    return found.backend("prefill"), found.backend("decode"), said


def test_a_bad_version_is_avoided_and_said_with_its_source():
    bad = replace(BAD, libraries=["FastLib>=2,<2.3"])
    said = {"known to be bad with fastlib 2.2: its answers are wrong (acme/fastlib#12)"}
    assert chosen(bad, {"fastlib": "2.2"}) == ("slow", "slow", said)
    assert chosen(bad, {"fastlib": "2.3"}) == ("fast", "fast", set())
    with pytest.raises(NoBackendError, match=r"acme/fastlib#12"):
        chosen(bad, {"fastlib": "2.2"}, attention_backend="fast")


def test_what_is_not_known_or_not_taken_is_no_reason():
    bad = replace(BAD, libraries=["otherlib<5"])
    assert chosen(bad, {"fastlib": "2", "otherlib": "4"})[1] == "fast"  # fastlib goes first
    assert chosen(bad, {"fastlib": "1", "otherlib": "4"})[1] == "slow"
    assert chosen(bad, {"otherlib": None})[1] == "fast"  # a version that is not known
    beside = replace(BAD, libraries=["torch==2.9.*"])  # the row does not name it
    assert chosen(beside, {"fastlib": "2", "torch": "2.9.1"})[1] == "slow"
    registry = Registry({("softmax", "slow"): replace(SLOW, known_bad=[beside])})
    assert "torch" in registry.installed_libraries(), "what it names is looked up"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, ("slow", "slow")),
        ({"phases": {Phase.DECODE}}, ("fast", "slow")),
        ({"head_dims": {64, 80}}, ("slow", "slow")),
        ({"head_dims": {80}}, ("fast", "fast")),
        ({"archs": {"a1"}}, ("slow", "slow")),
        ({"archs": {"a2"}}, ("fast", "fast")),
        ({"kinds": {"mla"}}, ("fast", "fast")),
        ({"kinds": {"mha"}, "archs": {"a2"}}, ("fast", "fast")),
    ],
)
def test_all_limits_have_to_hold(limits, expected):
    assert chosen(replace(BAD, **limits), {"fastlib": "2"})[:2] == expected


def test_why_not_names_the_source():
    fast = BackendSpec(name="fast", capabilities=[ROW], create="x:Y", known_bad=[BAD])
    specs = {("softmax", s.name): s for s in (fast, SLOW)}

    class Origin:
        module = "acme"

    registry = Registry(specs, dict.fromkeys(specs, Origin))
    answer = why_not("fast", NEEDS, WHERE, registry, {"fastlib": "2"})
    assert (answer.fits, answer.fixes) == (False, None)
    assert any("acme/fastlib#12" in reason for _, reason in answer.reasons)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": ""}, "source '' (expected text, not empty)"),
        ({"libraries": ["no version("]}, "libraries"),
        ({"head_dims": {0}}, "head_dims {0} (expected a set of int, above 0)"),
        ({"kinds": {"nope"}}, "kinds {'nope'}"),
        ({"why": 3}, "why 3 (expected text"),
        ({"why": "a\x1b[2J"}, "printable"),
    ],
)
def test_a_wrong_declaration_breaks_its_backend_alone(fields, said):
    spec = replace(SLOW, known_bad=[replace(BAD, **fields)])
    assert said in problem(spec)
    assert problem(spec).startswith("known_bad: ")
    assert problem(replace(SLOW, known_bad=["text"])).startswith("known_bad ")
    assert problem(replace(SLOW, known_bad=[BAD])) is None


def test_text_is_no_set():
    with pytest.raises(TypeError, match="libraries"):
        KnownBad(why="x", source="y", libraries="triton==3.5")


@pytest.mark.parametrize(
    ("arch", "library", "head_dim", "bad"),
    [
        ("sm89", {"sglang-kernel": "0.4.5"}, 256, True),
        ("sm86", {"sglang-kernel": "0.4.3"}, 224, True),
        ("sm89", {"sglang-kernel": "0.4.5"}, 128, False),
        ("sm80", {"sglang-kernel": "0.4.5"}, 256, False),
        ("sm90", {"sglang-kernel": "0.4.5"}, 256, False),
        ("sm89", {"flash-attn-3": "3.0.0"}, 256, False),
        ("sm89", {"sglang-kernel": "0.4.6"}, 256, False),
    ],
)
def test_what_the_ledger_of_nvidia_has(arch, library, head_dim, bad):
    """On Ada a head dim of 256 does not launch in one build of FlashAttention-3."""
    layer = LayerRequirements(num_q_heads=8, num_kv_heads=4, head_dim=head_dim)
    device = Device("cuda", arch, "13.0")
    answer = why_not("fa3", Requirements(layers=(layer,)), device, load_plugins(), library)
    said = [reason for _, reason in answer.reasons if "shared memory" in reason]
    assert bool(said) == bad == (not answer.fits)
    assert all("sglang/issues/38980" in reason for reason in said)
