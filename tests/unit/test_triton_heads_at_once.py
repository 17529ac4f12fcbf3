"""Programs of one part take several KV heads of its keys, and a merge looks at each cut."""

from unittest import mock

import pytest

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton.portable.merge import merge_splits
from attn_core.backends.triton.tuning import Launch
from attn_core.runtime.batch import ForwardMode
from edited import edited
from triton.runtime.interpreter import InterpretedFunction
from triton_passes import Requests, make_layer

LENGTHS = (290, 6, 40, 33, 1, 700, 64, 65)


def check(monkeypatch, heads, processors, at_once, *, deterministic=False):
    launch = Launch(block_m=16, block_n=32, warps=4, stages=1)
    monkeypatch.setattr(scheduler, "decode_launch", lambda *a, **k: launch)
    requests = Requests(make_layer(heads=heads, group=2, dim=16), LENGTHS, page=16, dtype="fp32")
    queries = [1] * len(LENGTHS)
    batch = requests.batch(queries, mode=ForwardMode.DECODE)
    config = {"deterministic": deterministic, "multiprocessors": processors}
    [schedule] = requests.backend(**config).init_forward_metadata(batch).values()
    cuts = schedule.split.cuts
    assert (cuts.heads_at_once, cuts.programs) == (at_once, processors)
    assert cuts.merges_cuts == (not deterministic and processors < heads * len(LENGTHS))
    q = requests.draw(len(LENGTHS))
    requests.check(requests.attend(batch, q, **config), q, queries)


FORMS = [(4, 12, 4), (4, 6, 2), (4, 7, 1), (2, 2, 2), (3, 3, 3), (3, 60, 3), (1, 5, 1)]


@pytest.mark.parametrize(
    ("heads", "processors", "at_once", "deterministic"),
    [
        *((*form, False) for form in FORMS),
        *((*form, True) for form in FORMS[:3:2]),
        *(pytest.param(*x, True, marks=pytest.mark.long) for x in (FORMS[1], *FORMS[3:])),
    ],
)
def test_equals_the_reference(heads, processors, at_once, deterministic, monkeypatch):
    check(monkeypatch, heads, processors, at_once, deterministic=deterministic)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("low == cut, count, 0", "low < cut, count, 0"),
        ("(cut + 1) * quota, work - 1)", "cut * quota, work - 1)"),
        ("lane = tl.program_id(0) % LANES", "lane = 0"),
        ("head_turn * SPLIT.HEADS_AT_ONCE + lane", "head_turn + lane"),
    ],
)
def test_a_fault_of_the_merge_is_seen(before, after, monkeypatch):
    kernel = merge_splits.fn
    new = {kernel: edited(kernel, before, after)}
    with mock.patch.dict(InterpretedFunction.rewritten_fn, new), pytest.raises(AssertionError):
        check(monkeypatch, 4, 6, 2)
