"""The host's part of a cost, measured on a machine that is now fast and now slow."""

import itertools
from dataclasses import replace

import pytest
from attn_core.costs.host import evened
from attn_core.costs.model import CostModel
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass

FORM = Form(kind="mla", q_heads=16, kv_heads=1, head_dim=576, v_head_dim=512, page_size=64)
HOST = {"a": 40.0, "b": 50.0}
SPEEDS = (0.7, 1.0, 1.8)


def passes():
    return [Pass.even("verify", n, length, 4) for n in (1, 2, 4) for length in (64, 256, 1024)]


def measured():
    """Two backends whose host's time is the same in all passes, but for the machine's speed."""
    return {
        Key(name, "", FORM, size): Cost(10.0, 10.0, 10.0, us * SPEEDS[i % len(SPEEDS)])
        for i, size in enumerate(passes())
        for name, us in HOST.items()
    }


def test_the_machines_speed_is_divided_out():
    found = evened(measured())
    for key, cost in found.costs.items():
        assert cost.host_us == pytest.approx(HOST[key.backend])
        assert cost._replace(host_us=0) == measured()[key]._replace(host_us=0)
    assert found.speeds == pytest.approx((0.7, 0.7, 1.0, 1.8, 1.8))


def test_a_call_takes_what_it_takes_on_average_over_the_machines_speeds():
    """A launch that is a little shorter than the kernel hides in it, but not in a slow second."""
    device = {"long": 62.0, "short": 55.0}
    host = {"long": 30.0, "short": 50.0}
    costs = {
        Key(name, "", FORM, size): Cost(device[name], device[name], device[name], us * speed)
        for size, speed in zip(passes(), itertools.cycle(SPEEDS), strict=False)
        for name, us in host.items()
    }
    size = passes()[3]
    asked = replace(size, kv_tokens=size.kv_tokens + 64, longest=size.longest + 64)
    for one in (size, asked):  # a measured pass, and one beside it
        model = CostModel(Profile(costs=costs))
        of = {n: model.estimate(n, "", FORM, one, graphs=False) for n in host}
        assert of["long"].us == pytest.approx(62.0, rel=0.05)
        assert of["short"].us == pytest.approx((3 * 55 + 2 * 90) / 5, rel=0.05)
        assert all(x.low <= x.us <= x.high for x in of.values())
        calm = CostModel(Profile(costs=evened(costs).costs))
        assert calm.estimate("short", "", FORM, one, graphs=False).us < of["long"].us


def test_an_estimate_compares_backends_at_one_speed():
    """The three speeds lie apart by more than the backends: the nearest passes alone mislead."""
    costs = measured()
    size = passes()[2]  # was measured while the machine was slow, and for one backend alone
    del costs[Key("b", "", FORM, size)]
    model = CostModel(Profile(costs=costs))
    us = {n: model.estimate(n, "", FORM, size, graphs=False).us for n in HOST}
    assert us["b"] / us["a"] == pytest.approx(HOST["b"] / HOST["a"], rel=0.05)
    assert model.estimate("a", "", FORM, size, graphs=True).us == pytest.approx(10.0)


def test_what_was_not_timed_on_the_host_stays():
    still = {key: cost._replace(host_us=0.0) for key, cost in measured().items()}
    assert evened(still) == (still, (1.0,))
    assert evened({}) == ({}, (1.0,))


def test_whole_prompts_and_chunks_may_take_other_launches():
    """Their usual times are apart, so that neither counts as a slow machine."""
    costs = {}
    for n in (1, 2, 4):
        whole = Pass.even("prefill", n, 64, 64)
        chunk = replace(whole, kv_tokens=n * 128, longest=128)
        for size, a in ((whole, 80.0), (chunk, 40.0)):
            for name, us in {"a": a, "b": 60.0}.items():
                costs[Key(name, "", FORM, size)] = Cost(10.0, 10.0, 10.0, us)
    assert {k: c.host_us for k, c in evened(costs).costs.items()} == {
        k: pytest.approx(c.host_us) for k, c in costs.items()
    }
