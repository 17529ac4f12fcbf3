"""Properties of the selection: total, pure, order-free, honest about every reason."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace

import pytest
import strategies as gen
from attn_core.cache.pool import KVPool
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form
from attn_core.costs.workload import Workload
from attn_core.errors import AttnError, UnknownBackendError, UnsupportedError, UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.diagnosis import describe, why_not
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device, parse_device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from hypothesis import example, given, settings
from hypothesis import strategies as st

simulated = st.booleans()
few = settings(max_examples=settings.default.max_examples // 4)  # a search tries many selections


def outcome(registry, needs, device, libraries, overrides=None, simulated=False):
    """The decision as data, or None where there is none."""
    try:
        return select(needs, device, registry, libraries, overrides, simulated=simulated).to_json()
    except NoBackendError as error:
        error.selection.to_json()  # the decision as far as it came can be shown
        return None
    except UsageError:  # a flag that has nothing to decide
        return None


@given(gen.plugins(), gen.plugins(), gen.requirements, gen.devices, gen.libraries, simulated)
def test_another_plugin_never_turns_success_into_failure(a, b, needs, device, libs, sim):
    more = [gen.point(f"more-{i}", _renamed(p, f"c{i}")) for i, p in enumerate(b)]
    before = outcome(load_plugins(a), needs, device, libs, simulated=sim)
    after = outcome(load_plugins([*a, *more]), needs, device, libs, simulated=sim)
    assert before is None or after is not None


def _levels(prefill, decode):
    """Two backends, one for each phase, whose rows have these levels of CUDA graphs."""
    row = Capabilities(
        kind="mha", device="any", dtypes={"bf16"}, kv_dtypes={"bf16"}, priority=1, max_verify_topk=1
    )
    rows = {
        name: replace(row, phases={phase}, cuda_graph=level)
        for name, phase, level in (
            ("pre", Phase.PREFILL, prefill),
            ("dec", Phase.DECODE, decode),
        )
    }
    specs = [
        BackendSpec(name=n, capabilities=[r], create="nowhere:Nothing") for n, r in rows.items()
    ]
    return load_plugins([gen.point("levels", specs)])


@pytest.mark.parametrize(
    ("mode", "prefill", "decode", "refused"),
    [
        (None, "never", "decode", None),
        (None, "uniform", "never", "dec: cuda_graph asked (not supported)"),
        ("prefill", "uniform", "decode", None),
        ("prefill", "decode", "uniform", "pre: cuda_graph uniform (supports decode)"),
        ("prefill", "never", "uniform", "pre: cuda_graph uniform (supports never)"),
        ("decode", "never", "uniform", None),
        ("decode", "uniform", "decode", "dec: cuda_graph uniform (supports decode)"),
    ],
)
def test_graphs_are_asked_of_every_role_that_is_captured(mode, prefill, decode, refused):
    """Decode needs the level "decode"; what verifies and drafts needs "uniform"."""
    registry, device = _levels(prefill, decode), Device("cpu")
    needs = Requirements(speculation=Speculation(mode=mode) if mode else None, graphs=True)
    assert select(replace(needs, graphs=False), device, registry, {}).backend("decode") == "dec"
    if refused is None:
        assert select(needs, device, registry, {}).requirements is needs
        return
    with pytest.raises(NoBackendError) as error:
        select(needs, device, registry, {})
    assert refused in str(error.value)


def _renamed(point, name):
    (spec,) = point.plugin.attn_register_backends()
    return [
        BackendSpec(
            name=name,
            capabilities=spec.capabilities,
            create=spec.create,
        )
    ]


@given(gen.plugins(2), gen.requirements, gen.devices, gen.libraries, st.randoms())
def test_the_order_of_entry_points_is_irrelevant(points, needs, device, libs, rng: random.Random):
    shuffled = list(points)
    rng.shuffle(shuffled)
    assert outcome(load_plugins(points), needs, device, libs) == outcome(
        load_plugins(shuffled), needs, device, libs
    )


@given(gen.plugins(2), gen.requirements, gen.devices, gen.libraries, simulated, st.data())
def test_an_explicit_name_is_honoured_or_refused(points, needs, device, libs, sim, data):
    registry = load_plugins(points)
    names = [s.name for s in registry.family("softmax")]
    if not names:
        return
    pick = st.none() | st.sampled_from(names)
    o = Overrides(
        attention_backend=data.draw(pick),
        prefill_attention_backend=data.draw(pick),
        decode_attention_backend=data.draw(pick),
    )
    chosen = outcome(registry, needs, device, libs, o, sim)
    if chosen is not None:
        for phase, own in (
            ("prefill", o.prefill_attention_backend),
            ("decode", o.decode_attention_backend),
        ):
            name = own or o.attention_backend
            assert name in (None, chosen[phase])


@given(gen.plugins(), gen.requirements, gen.devices, gen.libraries, simulated)
def test_every_backend_has_a_verdict_and_every_rejected_one_a_reason(
    points, needs, device, libs, sim
):
    registry = load_plugins(points)
    try:
        selection = select(needs, device, registry, libs, simulated=sim)
    except NoBackendError as error:
        selection = error.selection
    softmax = {s.name for s in registry.family("softmax")}
    phases = [Phase.PREFILL] if needs.softmax_layers else []
    if any(not x.encoder for x in needs.softmax_layers):
        phases.append(Phase.DECODE)
    for phase in phases:
        mine = [v for v in selection.verdicts if v.phase is phase and v.spec.family == "softmax"]
        assert {v.spec.name for v in mine} == softmax
        assert len(mine) == len(softmax)
    for v in selection.verdicts:
        assert v.fits or all(str(r) for r in v.reasons)
    for role, name in (
        ("prefill", selection.backend("prefill")),
        ("decode", selection.backend("decode")),
    ):
        if name is not None and role in {p.value for p in phases}:
            (v,) = [x for x in selection.verdicts if (x.phase.value, x.spec.name) == (role, name)]
            assert v.fits


@given(gen.plugins(), gen.requirements, gen.devices, gen.libraries, simulated)
def test_the_chosen_rows_really_share_a_cache(points, needs, device, libs, sim):
    try:
        chosen = select(needs, device, load_plugins(points), libs, simulated=sim)
    except NoBackendError:
        return
    if not needs.softmax_layers:
        assert chosen.backend("prefill") is chosen.backend("decode") is chosen.page_size is None
        return
    rows = [chosen.roles["prefill"].row, chosen.roles["decode"].row]
    for row in rows:
        assert chosen.layout in row.layouts
        assert not row.page_sizes or any(chosen.page_size % p == 0 for p in row.page_sizes)
        assert row.max_page_size is None or chosen.page_size <= row.max_page_size
        assert chosen.kv_cache_dtype in row.kv_dtypes
    assert needs.page_size in (None, chosen.page_size)


def flags_of(names: list[str]) -> st.SearchStrategy[Overrides]:
    pick = st.none() | st.sampled_from(names)
    lists = st.lists(st.sampled_from(names), max_size=2, unique=True).map(tuple)
    return st.builds(
        Overrides,
        attention_backend=pick,
        prefill_attention_backend=st.none() | pick,
        decode_attention_backend=st.none() | pick,
        deny=lists,
        allow=st.none() | st.none() | lists,
    )


def serving(selection, family):
    if family == "linear":
        return [selection.backend(f"linear_{role}") for role in ("prefill", "decode")]
    return [selection.backend("prefill"), selection.backend("decode"), selection.backend("encode")]


def gained(selection, spec, answer):
    """The roles of the backend that it has not had before."""
    every = serving(selection, spec.family)
    roles = ("prefill", "decode", "multimodal")
    return {r for r, name in zip(roles, every, strict=False) if name == spec.name} - set(
        answer.chosen
    )


@few
@given(gen.plugins(2), gen.requirements, gen.devices, gen.libraries, simulated, st.data())
def test_the_smallest_change_makes_it_fit(points, needs, device, libs, sim, data):
    """The changes and the flag, applied to what was asked, give the backend a role; all of them.

    Leaving out any one, the flag too, takes it away again.
    """
    registry = load_plugins(points)
    spec = data.draw(st.sampled_from(sorted(registry.backends.values(), key=lambda s: s.name)))
    softmax = [s.name for s in registry.family("softmax")]
    flags = data.draw(flags_of(softmax)) if softmax else Overrides()
    check_answer(registry, spec, needs, device, libs, flags, sim)


def check_answer(registry, spec, needs, device, libs, flags, sim):
    asked = SelectionInputs(needs, device, libs, flags, sim)
    try:
        answer = why_not(
            spec.name,
            needs,
            device,
            registry,
            libs,
            flags,
            simulated=sim,
            family=spec.family,
        )
    except UsageError:  # a flag that has nothing to decide
        return
    assert spec.name in describe(answer)
    assert answer.fits == (answer.fixes == ())
    if answer.fixes is None:
        assert answer.reasons or not spec.implemented
        return
    fixes = (*answer.fixes, *answer.named)
    if not fixes:
        assert answer.chosen
        return
    roles = gained(asked.apply(fixes).select(registry), spec, answer)
    assert roles
    for left_out in fixes:
        rest = asked.apply(tuple(c for c in fixes if c is not left_out))
        try:
            still = gained(rest.select(registry), spec, answer)
        except AttnError:
            continue
        assert not roles <= still, left_out


def drafts_that_no_linear_backend_verifies():
    """One row fits; the other wants a library and a model without linear layers.

    The selection fails over the linear layers. Without them the first row serves, so that the
    library of the second is superfluous.
    """
    able = Capabilities(
        kind="mha",
        device="any",
        dtypes={"bf16"},
        kv_dtypes={"bf16"},
        priority=10,
        max_verify_topk=1,
    )
    other = replace(able, with_linear_layers=False, requires=("liba>=2",))
    better = replace(able, priority=30)
    return [
        gen.point(name, [BackendSpec(name=name, capabilities=rows, create="a:B")])
        for name, rows in (("b0", [able, other]), ("b1", [better]))
    ]


@few
@given(gen.plugins(2), gen.requirements, gen.devices, gen.libraries, simulated)
@example(
    drafts_that_no_linear_backend_verifies(),
    Requirements(
        layers=(LayerRequirements(), LayerRequirements(kind="gdn", head_dim=128)),
        speculation=Speculation(mode="decode"),
    ),
    Device("cuda", "x1"),
    {},
    False,
)
def test_every_single_change_was_needed(points, needs, device, libs, sim):
    """The same of every backend, without a flag of the caller."""
    registry = load_plugins(points)
    for spec in registry.backends.values():
        check_answer(registry, spec, needs, device, libs, Overrides(), sim)


# Examples, each a rule of its own.


def row(**kw):
    base = {
        "kind": "mha",
        "device": "any",
        "dtypes": {"bf16"},
        "kv_dtypes": {"bf16", "fp8_e4m3"},
        "priority": 10,
    }
    return Capabilities(**{**base, **kw})


def registry_of(**backends):
    specs = [
        BackendSpec(name=n, capabilities=r if isinstance(r, list) else [r], create="no:No")
        for n, r in backends.items()
    ]
    return load_plugins([gen.point("dist", specs)])


HERE = Device("acme", "x1", "2.0")


def test_reasons_hold_the_value_asked_and_those_supported():
    registry = registry_of(a=row(page_sizes={32, 64}), b=row(head_dims={64, 128, 256}))
    with pytest.raises(NoBackendError) as caught:
        select(
            Requirements(page_size=16, layers=(LayerRequirements(head_dim=96),)), HERE, registry, {}
        )
    reasons = {v.spec.name: [str(r) for r in v.reasons] for v in caught.value.selection.verdicts}
    assert reasons["a"] == ["page_size 16 (supports 32, 64)"]
    assert reasons["b"] == ["head_dim 96 (supports 64, 128, 256)"]


def test_an_unknown_name_is_answered_with_the_near_ones():
    registry = registry_of(flashinfer=row(), triton=row())
    with pytest.raises(UnknownBackendError, match="known: flashinfer, triton"):
        select(Requirements(), HERE, registry, {}, Overrides(attention_backend="flashinfr"))


def test_prefer_is_an_order_allow_and_deny_are_lists():
    registry = registry_of(a=row(priority=30), b=row(priority=20), c=row())
    assert select(Requirements(), HERE, registry, {}).backend("prefill") == "a"
    for overrides, expected in (
        (Overrides(prefer=("c", "b")), "c"),
        (Overrides(deny=("a",)), "b"),
        (Overrides(allow=("c", "b")), "b"),
        (Overrides(allow=("b", "a"), prefer=("b",)), "b"),
    ):
        assert select(Requirements(), HERE, registry, {}, overrides).backend("decode") == expected
    with pytest.raises(NoBackendError, match="nearest are"):
        select(Requirements(), HERE, registry, {}, Overrides(allow=()))


def measured(us, *, page_size=1, host_us=0.0):
    """Return a profile: backend → phase → µs of every pass of the default workload."""
    form = Form(q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=page_size)
    costs = {
        Key(name, "", form, size): Cost(value, value * 0.99, value * 1.01, host_us)
        for name, phases in us.items()
        for phase, value in phases.items()
        for size, _ in Workload().passes(Phase(phase), None)
    }
    return Profile(costs=costs)


def test_a_measured_profile_ranks_before_priorities():
    registry = registry_of(a=row(priority=30), b=row(priority=10))
    profile = measured({"b": {"decode": 1.0, "prefill": 2.0}, "a": {"decode": 3.0}})
    chosen = select(Requirements(), HERE, registry, {}, profile=profile)
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("b", "b")
    assert "measured" in chosen.roles["decode"].reason
    assert "67 % less than a (sure)" in chosen.roles["decode"].reason


def test_what_is_within_the_error_is_said_to_be_unsure():
    registry = registry_of(a=row(priority=30), b=row(priority=10))
    profile = measured({"a": {"decode": 1.01}, "b": {"decode": 1.0}})
    chosen = select(Requirements(), HERE, registry, {}, profile=profile)
    assert chosen.backend("decode") == "b"
    assert "(not sure)" in chosen.roles["decode"].reason
    assert "0.200 µs (0.198 µs to 0.202 µs)" not in chosen.roles["decode"].reason


def test_phases_are_weighed_together_where_they_cannot_share_a_cache():
    """Alone, a is best in prefill and b in decode; of what shares a layout, b twice costs less."""
    registry = registry_of(a=row(layouts={"HND"}), b=row(layouts={"NHD"}))
    us = {"a": {"prefill": 10.0, "decode": 9.0}, "b": {"prefill": 12.0, "decode": 1.0}}
    chosen = select(Requirements(), HERE, registry, {}, profile=measured(us))
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("b", "b")
    assert "with a this phase alone takes 10.0 µs" in chosen.roles["prefill"].reason
    # 60 times as much work in prompts turns it round
    prompts = Workload(prompts={1024: 1}, requests={64: 1}, output=1)
    us = {"a": {"prefill": 10.0, "decode": 9.0}, "b": {"prefill": 12.0, "decode": 1.0}}
    chosen = select(Requirements(), HERE, registry, {}, profile=measured(us), workload=prompts)
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("a", "a")


@pytest.mark.parametrize("best", ["a", "b"])
def test_prefill_of_one_backend_is_not_compared_with_decode_of_another(best):
    """No pair that shares a cache was measured in both phases: no cost says which is better."""
    a, b = (
        row(layouts={x}, priority=20 + 10 * (n == best)) for n, x in (("a", "HND"), ("b", "NHD"))
    )
    for us in ((12.0, 1.0), (1.0, 12.0)):
        profile = measured({"a": {"prefill": us[0]}, "b": {"decode": us[1]}})
        chosen = select(Requirements(), HERE, registry_of(a=a, b=b), {}, profile=profile)
        assert (chosen.backend("prefill"), chosen.backend("decode")) == (best, best), us


def test_a_phase_that_was_not_measured_counts_as_its_dearest():
    """c saves time in prefill, and b none in decode: it is the only one that was measured there."""
    rows = {"a": row(bans={"b": "no"}), "b": row(priority=30), "c": row(bans={"b": "no"})}
    us = {"a": {"prefill": 2.0}, "b": {"decode": 1.0}, "c": {"prefill": 1.0}}
    chosen = select(Requirements(), HERE, registry_of(**rows), {}, profile=measured(us))
    assert chosen.backend("prefill") == "c"


def test_a_call_without_a_graph_takes_no_less_than_the_host():
    graph, eager = row(cuda_graph="always"), row(cuda_graph="never")
    registry = registry_of(a=eager, b=graph)
    us = {"a": {"decode": 1.0, "prefill": 1.0}, "b": {"decode": 2.0, "prefill": 2.0}}
    profile = measured(us, host_us=50.0)
    chosen = select(Requirements(), HERE, registry, {}, profile=profile)
    assert chosen.backend("decode") == "b"
    assert "with b" not in chosen.roles["decode"].reason


def test_one_solve_over_both_phases_agrees_on_page_layout_and_cache():
    """The best prefill alone and the best decode alone cannot share a cache: the pair is solved."""
    registry = registry_of(
        pre=row(priority=30, phases={Phase.PREFILL}, layouts={"HND"}),
        dec=row(priority=30, phases={Phase.DECODE}, layouts={"NHD"}),
        both=row(priority=10),
    )
    chosen = select(Requirements(), HERE, registry, {})
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("both", "dec")
    assert any("no common KV layout" in c for c in chosen.conflicts)


def test_page_size_is_the_smallest_that_both_take():
    registry = registry_of(
        a=row(page_sizes={48, 32}, phases={Phase.PREFILL}),
        b=row(page_sizes={64}, phases={Phase.DECODE}),
    )
    assert select(Requirements(), HERE, registry, {}).page_size == 64
    assert select(Requirements(page_size=192), HERE, registry, {}).page_size == 192
    with pytest.raises(NoBackendError, match="page_size 96 "):
        select(Requirements(page_size=96), HERE, registry, {})


def test_a_page_of_layout_hnd_is_none_that_the_kernel_would_split():
    """The dispatcher refuses it: the parts of a page lie apart in each of its heads."""
    alone = registry_of(a=row(page_sizes={16, 32}, layouts={"HND"}))
    assert select(Requirements(page_size=32), HERE, alone, {}).layout == "HND"
    with pytest.raises(NoBackendError, match=r"page_size 48 \(supports 16, 32\)"):
        select(Requirements(page_size=48), HERE, alone, {})
    one = registry_of(a=row(page_sizes={16}, layouts={"HND"}))
    with pytest.raises(NoBackendError, match=r"page_size 32 \(supports 16\)"):
        select(Requirements(page_size=32), HERE, one, {})
    pair = registry_of(
        a=row(page_sizes={16}, layouts={"HND", "NHD"}, phases={Phase.PREFILL}),
        b=row(layouts={"HND"}, phases={Phase.DECODE}),
    )
    assert select(Requirements(), HERE, pair, {}).page_size == 16
    with pytest.raises(NoBackendError, match="no common page size"):
        select(Requirements(page_size=32), HERE, pair, {})


def test_a_window_without_causal_order_fits_no_row():
    """Every backend refuses it at creation, and no check of the suite tests it."""
    rows = registry_of(a=row(sliding_window=True, encoder=True, cross_attention=True))
    select(Requirements(layers=(LayerRequirements(sliding_window=8),)), HERE, rows, {})
    for without in ({"encoder": True}, {"cross": True}):
        layers = (LayerRequirements(), LayerRequirements(sliding_window=8, **without))
        with pytest.raises(NoBackendError, match="a sliding window of 8 without causal order"):
            select(Requirements(layers=layers), HERE, rows, {})


def test_a_preferred_page_size_says_what_it_costs_in_reuse():
    registry = registry_of(
        a=row(page_sizes={16, 64}, preferred_page_size=64, preferred_page_reason="1.17 x faster")
    )
    chosen = select(Requirements(), HERE, registry, {})
    assert chosen.page_size == 64
    assert "1.17 x faster" in chosen.page_size_reason
    assert "whole pages of 64 tokens" in chosen.page_size_reason


def test_an_impossible_pair_is_explained_as_a_pair():
    registry = registry_of(a=row(bans={"b": "they read FP4 differently"}), b=row())
    o = Overrides(prefill_attention_backend="a", decode_attention_backend="b")
    with pytest.raises(NoBackendError, match=r"a \(prefill\) with b \(decode\): they read FP4"):
        select(Requirements(), HERE, registry, {}, o)


def test_flags_with_nothing_to_decide_are_refused():
    registry = registry_of(a=row())
    with pytest.raises(UsageError, match="no linear attention layers"):
        select(Requirements(), HERE, registry, {}, Overrides(linear_attn_backend="a"))
    with pytest.raises(UsageError, match="no vision tower"):
        select(Requirements(), HERE, registry, {}, Overrides(mm_attention_backend="a"))


def test_linear_layers_without_a_backend_stay_the_models_own():
    needs = Requirements(layers=(LayerRequirements(), LayerRequirements(kind="gdn")))
    chosen = select(needs, HERE, registry_of(a=row()), {})
    assert chosen.backend("linear_prefill") is None
    assert any("keeps its own linear attention layers" in a for a in chosen.assumptions)


def test_speculation_asks_the_backend_that_verifies():
    registry = registry_of(
        a=row(priority=30, max_verify_topk=0),
        b=row(priority=20, max_verify_topk=1),
        c=row(max_verify_topk=8),
    )
    for mode, topk, expected in (
        ("prefill", 1, ("b", "a", "b")),
        ("decode", 1, ("a", "b", "b")),
        ("decode", 4, ("a", "c", "c")),
    ):
        needs = Requirements(speculation=Speculation(topk=topk, mode=mode))
        chosen = select(needs, HERE, registry, {})
        assert (
            chosen.backend("prefill"),
            chosen.backend("decode"),
            chosen.backend("verify"),
        ) == expected
        assert chosen.backend("draft") == chosen.backend("verify")


def test_a_declared_backend_is_chosen_beside_the_best_that_runs_today():
    registry = load_plugins(
        [
            gen.point(
                "dist",
                [
                    BackendSpec(
                        name="soon",
                        capabilities=[row(priority=30)],
                    ),
                    BackendSpec(name="now", capabilities=[row(priority=20)], create="a:B"),
                ],
            )
        ]
    )
    asked = (Requirements(), HERE, registry, {})
    chosen = select(*asked, simulated=True)
    assert (chosen.backend("prefill"), chosen.runs_today) == (
        "soon",
        {"prefill": "now", "decode": "now"},
    )
    assert "runs today: now" in chosen.explain()
    assert chosen.to_json()["runs_today"] == {"prefill": "now", "decode": "now"}
    named = select(*asked, Overrides(prefill_attention_backend="soon"), simulated=True)
    assert named.runs_today == {"prefill": "now", "decode": "now"}
    denied = select(*asked, Overrides(deny=("now",)), simulated=True)
    assert denied.runs_today == {"prefill": None, "decode": None}
    assert select(*asked).runs_today == {}  # here nothing else is chosen


def test_a_reference_backend_on_an_accelerator_is_said_to_be_slow_and_how_to_avoid_it():
    registry = registry_of(
        ref=row(priority=0, max_verify_topk=8),
        fast=row(priority=30, phases={Phase.PREFILL}),
        fast_decode=row(priority=30, phases={Phase.DECODE}, max_verify_topk=8),
    )
    needs = Requirements(speculation=Speculation(topk=4))
    chosen = select(needs, HERE, registry, {})
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("ref", "fast_decode")
    (said,) = chosen.advice
    assert "prefill runs on ref, a reference" in said
    assert "; to avoid it: --speculative-attention-mode decode" in said
    assert said in chosen.explain()
    assert chosen.to_json()["advice"] == [said]
    avoided = replace(needs, speculation=Speculation(topk=4, mode="decode"))
    assert select(avoided, HERE, registry, {}).advice == ()
    assert select(needs, Device("cpu", "amx"), registry, {}).advice == ()
    named = Overrides(prefill_attention_backend="ref")
    assert select(needs, HERE, registry, {}, named).advice == ()
    alone = select(Requirements(), HERE, registry_of(ref=row(priority=0)), {})
    assert all("no single flag avoids it" in text for text in alone.advice)
    assert len(alone.advice) == 2


def test_a_float32_model_on_an_accelerator_is_advised_to_take_bf16():
    registry = registry_of(
        slow=row(dtypes={"fp32", "bf16"}, kv_dtypes={"fp32", "bf16"}), fast=row(priority=30)
    )
    (said,) = select(Requirements(dtype="fp32"), HERE, registry, {}).advice
    assert "--dtype bf16 halves the cache and runs prefill on fast and decode on fast" in said
    assert select(Requirements(), HERE, registry, {}).advice == ()
    assert select(Requirements(dtype="fp32"), Device("cpu", "amx"), registry, {}).advice == ()


def test_a_refusal_reaches_another_process_whole():
    """Workers of an engine raise it, and pickle carries it to the parent."""
    registry = load_plugins()
    named = Overrides(attention_backend="flex_attention")
    needs = Requirements(layers=(LayerRequirements(sinks=True),))
    with pytest.raises(NoBackendError) as refused:
        select(needs, parse_device("cpu"), registry, {}, named)
    error = refused.value
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is NoBackendError
        assert str(copied) == str(error)
        assert copied.selection == error.selection


@pytest.mark.parametrize("page", [0, 2.5, "16"])
def test_a_page_size_that_is_no_number_of_tokens_is_refused(page):
    with pytest.raises(UsageError, match=f"--page-size {page}: at least 1, an integer"):
        select(Requirements(page_size=page), parse_device("cuda:sm90"), load_plugins(), {})


@pytest.mark.parametrize(
    ("kind", "store", "dims", "expected"),
    [
        ("mha", "fp4_e2m1", (100, 100), r"head_dim 100 in fp4_e2m1 \(supports multiples of 16"),
        ("mha", "fp4_e2m1", (64, 72), "head_dim 64/72 in fp4_e2m1"),
        ("mla", "fp4_e2m1", (584, 512), "head_dim 584/512 in fp4_e2m1"),
        ("dsa", "fp8_e4m3", (264, 200), r"head_dim 264/200 in fp8_e4m3 \(supports latents by 128"),
        ("mla", "fp4_e2m1", (576, 500), None),  # V is part of the latent
        ("mha", "fp4_e2m1", (96, 96), None),
    ],
)
def test_a_store_whose_blocks_do_not_divide_the_dims_is_refused(kind, store, dims, expected):
    """As the pool refuses it, and before that: the selection chose backends for no pool."""
    registry, device = load_plugins(), parse_device("cuda:sm90")
    heads = (4, 2) if kind == "mha" else (4, 1)
    more = {"index_topk": 64, "index_heads": 4, "index_dim": 32} if kind == "dsa" else {}
    needs = LayerRequirements(
        kind=kind, head_dim=dims[0], v_head_dim=dims[1], num_q_heads=heads[0],
        num_kv_heads=heads[1], **more,
    )  # fmt: skip
    twice = (needs, replace(needs, num_q_heads=8))
    needs = Requirements(layers=twice, kv_cache_dtype=store)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0],
        v_head_dim=dims[1], scale=1.0,
    )  # fmt: skip

    def pool():
        return KVPool([layer], num_pages=2, page_size=1, kv_cache_dtype=store, kind=kind)

    if expected is None:
        assert select(needs, device, registry, {"triton": None}).kv_cache_dtype == store
        pool()
        return
    with pytest.raises(UnsupportedError):
        pool()
    with pytest.raises(NoBackendError, match=expected):
        select(needs, device, registry, {"triton": None})
