"""`attn check NAME --against OTHER` compares two backends in the cases that both declare."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core.cli.against import compare_backends
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device
from attn_core.testing.against import compare_all, pairs
from attn_core.testing.plan import plan
from faulty import registry
from reference import spec_of

HERE = Device("cpu")
FEW = ("prefill", "window", "decode", "ragged", "verify", "fp8")


def compared(first, second, kinds=("mha", "mla"), words=FEW):
    plans = [plan(spec, HERE, {}, kinds=kinds, reduced=True) for spec in (first, second)]
    matched = [*pairs(*plans)]
    named = [p for p in matched if any(word in p.first.check.id for word in words)]
    return compare_all(named[::3], (first, second), torch.device("cpu"))


def narrow(spec, **changes):
    rows = [dataclasses.replace(row, dtypes={"fp32"}, **changes) for row in spec.capabilities]
    return dataclasses.replace(spec, capabilities=rows)


def test_right_backends_agree_also_where_one_writes_the_cache_itself():
    done = compared(narrow(spec_of()), narrow(spec_of(fused=True, requires_finite_padding=True)))
    assert {x.kind for x in done if x.ran} == {"mha", "mla"}
    assert [x.detail for x in done if x.differs] == []
    assert all(x.measure.budget > 0 for x in done if x.ran)


def test_a_fault_is_found_where_it_is():
    known = registry()
    right, wrong = narrow(known.get("reference")), narrow(known.get("windowed"))
    done = compared(wrong, right, kinds=("mha",), words=("window", "decode"))
    differ = {x.feature for x in done if x.differs}
    assert len(differ) > 2
    assert all("window" in feature for feature in differ)
    assert any("window" not in x.feature for x in done if x.ran)


def test_what_only_one_declares_is_not_compared():
    first = narrow(registry().get("reference"))
    done = compared(first, narrow(first, sliding_window=False), kinds=("mha",))
    reasons = [x.detail for x in done if not x.ran]
    assert any("the other backend: sliding_window" in reason for reason in reasons)
    assert not any(x.differs for x in done)


def test_a_backend_is_not_compared_with_itself_nor_in_kinds_that_differ():
    spec = registry().get("torch_native")
    known = Registry(backends={("softmax", spec.name): spec})
    names = ("torch_native", "sdpa")
    with pytest.raises(UsageError, match="that is the backend itself"):
        compare_backends(known, names, HERE, ("mha",), quick=True, json=False)
    other = registry()
    with pytest.raises(UsageError, match="--against compares layers of kind mha and mla"):
        compare_backends(other, ("reference", "sdpa"), HERE, ("dsa",), quick=True, json=False)
