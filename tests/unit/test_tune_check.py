"""What tuning compares before it times: faults that are planted anywhere in a pass are found."""

from __future__ import annotations

import sys
import time
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.measure import session as sessions
from attn_core.measure import spent as spents
from attn_core.measure.answers import Span, sample
from attn_core.measure.candidates import Candidate, Job
from attn_core.measure.inputs import build
from attn_core.measure.session import session
from attn_core.measure.spent import Spent
from attn_core.measure.timing import CpuClock
from attn_core.ops.kv import read_kv
from attn_core.plugins.registry import load_plugins
from attn_core.spec.kinds import SERVING

CPU = torch.device("cpu")
FORM = Form(q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, dtype="bf16", page_size=16)
RAGGED = Pass(phase="decode", requests=40, kv_tokens=40 * 90, longest=400, queries=40)
PROMPTS = Pass(phase="prefill", requests=5, kv_tokens=400, longest=150, queries=400)
CHUNK = Pass.even("prefill", 3, 90, 40)
TREE = Pass.even("verify", 6, 70, 5, tree=True)


class Faulty(TorchNative):
    """Right, but for what `fault` does to its output [T, Hq, Dv]; calls are noted."""

    @staticmethod
    def fault(out, batch):
        return None

    def forward(self, q, k, v, layer, cache, batch, metadata, **options):
        out = super().forward(q, k, v, layer, cache, batch, metadata, **options)
        self.fault(out, batch)
        return out


@pytest.fixture
def candidates(monkeypatch):
    """Return a function that makes candidates of these names, the faulty one by its fault."""
    good = load_plugins().get("torch_native")
    fits = [r for r in good.capabilities if r.kind == "mha" and r.device in ("cpu", "any")]
    row = next(r for r in fits if r.phases >= SERVING and "bf16" in r.kv_dtypes)
    module = types.ModuleType("planted_backends")
    module.Faulty = Faulty
    monkeypatch.setitem(sys.modules, "planted_backends", module)
    bad = replace(good, name="faulty", create="planted_backends:Faulty", aliases=())

    def make(fault, *names):
        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        known = {"torch_native": good, "faulty": replace(bad, capabilities=(row,))}
        return tuple(Candidate(known[n], replace(row, create=None)) for n in names)

    return make


def tried(size, chosen, form=FORM):
    costs, bad, _ = sessions.run(form, size, chosen, CPU, CpuClock(), 0.0, arch=None)
    return {k.backend for k in costs}, {k.backend: why for k, why in bad.items()}


def lengths_of(size):
    return build(FORM, size, CPU).batch.views["full"].seq_lens_host


def in_last_request(out, batch):
    out[batch.cu_seqlens_q[-2] :] *= 1.05


def in_last_head(out, batch):
    out[:, -1] *= 1.05


def in_last_row(out, batch):
    """Of each request."""
    out[batch.cu_seqlens_q[1:] - 1] *= 1.05


def in_longest(out, batch):
    keys = batch.views["full"].seq_lens_host
    b = keys.index(max(keys))
    out[batch.cu_seqlens_q[b + 1] - 1] *= 1.05


def in_shortest(out, batch):
    keys = batch.views["full"].seq_lens_host
    b = keys.index(min(keys))
    out[batch.cu_seqlens_q[b + 1] - 1] *= 1.05


def at_large_size(out, batch):
    if sum(batch.views["full"].seq_lens_host) > 300:
        out.mul_(1.05)


@pytest.mark.parametrize("size", [RAGGED, PROMPTS, CHUNK, TREE], ids=lambda x: x.phase)
@pytest.mark.parametrize(
    "fault", [in_last_request, in_last_head, in_last_row, in_longest, in_shortest, at_large_size]
)
def test_a_backend_that_is_alone_and_wrong_in_one_place_is_caught(candidates, size, fault):
    """No other's output is beside it, so that the sample has to meet the fault."""
    if fault is at_large_size and size.kv_tokens <= 300:
        assert tried(size, candidates(fault, "faulty")) == ({"faulty"}, {})
        return
    right, bad = tried(size, candidates(fault, "faulty"))
    assert right == set()
    assert bad["faulty"].startswith("wrong: ")


@pytest.mark.parametrize("names", [("torch_native", "faulty"), ("faulty", "torch_native")])
@pytest.mark.parametrize("size", [RAGGED, PROMPTS, CHUNK], ids=lambda x: x.phase)
def test_one_wrong_row_anywhere_is_caught_beside_another_backend(candidates, size, names):
    """Whoever comes first, and with the row in no sample: the oracle says who is wrong."""
    inputs = build(FORM, size, CPU)
    keys, starts = inputs._lengths
    counts = [b - a for a, b in pairwise(starts)]
    rows = sample(f"{FORM}: {size}", keys, counts, FORM.page_size)
    known = {starts[b] + i for b, queries in rows.items() for i in queries}
    unknown = [row for row in range(starts[-1]) if row not in known]
    assert len(unknown) > 20
    for row in unknown[:: len(unknown) // 6]:

        def fault(out, batch, row=row):
            out[row, 1] = out[row, 0]

        right, bad = tried(size, candidates(fault, *names))
        assert right == {"torch_native"}, row
        request = max(b for b, start in enumerate(starts[:-1]) if start <= row)
        assert f"query {row - starts[request]} of request {request}: " in bad["faulty"]
        assert tried(size, candidates(fault, "faulty")) == ({"faulty"}, {})  # alone it passes


def test_what_rounds_differently_is_not_disputed(candidates):
    def fault(out, batch):
        out.copy_((out.float() * (1 + 2**-9)).to(out.dtype))

    assert tried(PROMPTS, candidates(fault, "torch_native", "faulty"))[1] == {}
    span = Span()
    span.add(torch.ones(4, 2, 8, dtype=torch.bfloat16))
    assert span.disputed([0, 1, 4]) == {}
    span.add(torch.full((4, 2, 8), 1 + 2**-7, dtype=torch.bfloat16))
    assert span.disputed([0, 1, 4]) == {}
    off = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    off[2, 1, 3] = 0.9
    span.add(off)
    assert span.disputed([0, 1, 4]) == {1: [1]}


def test_an_output_that_changes_from_call_to_call_is_compared_again(candidates):
    """The second call is compared where outputs differ: NaN there is no time."""
    calls = []

    def fault(out, batch):
        calls.append(1)
        out[3, 1] = torch.nan if len(calls) > 1 else 1.0

    right, bad = tried(RAGGED, candidates(fault, "torch_native", "faulty"))
    assert right == {"torch_native"}
    assert bad["faulty"].startswith("wrong: ")


def test_the_sample_has_the_ends_of_what_differs_between_requests():
    keys = [50, 33, 700, 64, 5, 49, *([40] * 30), 41]
    queries = [min(key, 7) for key in keys]
    found = sample("a pass", keys, queries, 16)
    assert found == sample("a pass", keys, queries, 16)
    # first, last, longest, shortest; a full last page, and one of a single token
    assert {0, len(keys) - 1, 2, 4, 3, 1} <= found.keys()
    assert len(found) <= 7
    for b, rows in found.items():
        assert {0, queries[b] - 1} <= {*rows} <= {*range(queries[b])}
        assert len(rows) <= 4
    lots = {b for i in range(200) for b in sample(f"{i}", keys, queries, 16)}
    assert lots == {*range(len(keys))}  # over many passes every place is met


@pytest.mark.parametrize(
    "form",
    [
        FORM,
        replace(FORM, store="fp8_e4m3"),
        Form(kind="mla", q_heads=4, kv_heads=1, head_dim=576, v_head_dim=512, page_size=16),
    ],
    ids=lambda x: f"{x.kind}-{x.store}",
)
@pytest.mark.parametrize("size", [RAGGED, PROMPTS, CHUNK], ids=lambda x: x.phase)
def test_new_tokens_are_handed_over_as_engines_do(form, size):
    """They are the last keys of each request, as the cache holds them."""
    inputs = build(form, size, CPU)
    keys, starts = inputs._lengths
    table = inputs.batch.views["full"].page_table
    for b in (0, len(keys) // 2, len(keys) - 1):
        new = range(keys[b] - (starts[b + 1] - starts[b]), keys[b])
        slots = torch.tensor([int(table[b, at // 16]) * 16 + at % 16 for at in new])
        k, v = read_kv(inputs.cache, slots, inputs.q.dtype)
        assert torch.equal(inputs.k[starts[b] : starts[b + 1]], k)
        if v is None:
            assert inputs.v is None
        else:
            assert torch.equal(inputs.v[starts[b] : starts[b + 1]], v)


def test_a_backend_is_called_with_the_new_tokens(candidates, monkeypatch):
    given = []
    kept = TorchNative.forward

    def forward(self, q, k, v, *args, **options):
        given.append((q.shape[0], k.shape[0], v.shape[0]))
        return kept(self, q, k, v, *args, **options)

    monkeypatch.setattr(TorchNative, "forward", forward)
    tried(PROMPTS, candidates(lambda out, batch: None, "torch_native"))
    assert set(given) == {(400, 400, 400)}


def test_what_compiles_while_tuning_is_no_tuning(candidates, monkeypatch):
    """What only the first plan takes is compiling, and the minutes wait for it."""
    monkeypatch.setattr(spents, "LONG_S", 0.05)
    kept, plans = TorchNative.init_forward_metadata, []

    def plan(self, batch):
        if not plans:
            time.sleep(1.0)
        plans.append(1)
        return kept(self, batch)

    monkeypatch.setattr(TorchNative, "init_forward_metadata", plan)
    (native,) = candidates(lambda out, batch: None, "torch_native")
    todo = [Job(FORM, Pass.even("decode", n, 20), (native,)) for n in (1, 2)]
    first, second = session(todo, Profile(), {"device": "x"}, CPU, arch=None, minutes=0.5 / 60)
    assert 0.5 < first.spent.compiling < 5
    assert first.spent.seconds["torch_native", "plan"] < 0.9
    assert second.profile.costs  # it began after more than the minutes
    assert "compiling 1.0 s" in str(Spent({("a", "compiling"): 1.0}))


def test_a_plan_is_timed_beside_the_passes(candidates, monkeypatch):
    kept = TorchNative.init_forward_metadata

    def plan(self, batch):
        time.sleep(0.004)
        return kept(self, batch)

    monkeypatch.setattr(TorchNative, "init_forward_metadata", plan)
    (native,) = candidates(lambda out, batch: None, "torch_native")
    job = Job(FORM, Pass.even("decode", 1, 20), (native,))
    (step,) = session([job], Profile(), {"device": "x"}, CPU, arch=None, minutes=1)
    (cost,) = step.profile.costs.values()
    assert cost.plan_us > 4000
    assert cost.us < cost.plan_us  # a call has no part in it, nor it in a call


def test_what_takes_long_every_time_is_no_compiling(monkeypatch):
    monkeypatch.setattr(spents, "LONG_S", 0.02)
    spent = Spent()
    assert spent.settled("a", "plan", lambda: time.sleep(0.1) or 5) == 5
    assert spent.compiling < 0.05
    assert spent.seconds["a", "plan"] > 0.15
    with pytest.raises(RuntimeError, match="no kernel"):
        spent.settled("b", "plan", _fails)
    assert spent.seconds["b", "plan"] > 0.05


def _fails():
    time.sleep(0.06)
    raise RuntimeError("no kernel")
