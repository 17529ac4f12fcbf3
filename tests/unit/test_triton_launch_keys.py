"""What decides whether a launch may be repeated: keys of what Triton specialises, and addresses."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attn_core.ops import forms
from attn_core.ops.triton import launcher as module
from attn_core.ops.triton.launcher import alike, moved, numbered, pointers
from threads import at_once


def test_a_tensor_that_moved_is_noticed():
    k, v = torch.zeros(8), torch.zeros(8)
    where = pointers(k, None, v)
    assert not moved(where)
    v.fill_(1)
    assert not moved(where)
    v.set_(torch.zeros(8))
    assert moved(where)


def test_keys_are_equal_where_triton_specialises_alike(monkeypatch):
    flat = torch.zeros(64, dtype=torch.bfloat16)
    assert alike(flat) == alike(flat[8:]) == alike(flat[16:])
    assert alike(flat) != alike(flat[1:])
    assert alike(flat) != alike(flat.view(torch.float16))
    assert alike(flat[1:], flat.data_ptr()) == alike(flat), "the address that is given counts"
    host, device = (
        SimpleNamespace(dtype=flat.dtype, data_ptr=flat.data_ptr, is_cuda=x) for x in (False, True)
    )
    assert alike(host) != alike(device), "Triton refuses tensors of the host when it compiles"
    # AMD's compiler takes offsets of 32 bits where a whole storage is that small
    large = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(module, "_ON_AMD", True)
    assert alike(large[:64]) != alike(torch.empty(64, dtype=torch.bfloat16, device="meta"))
    one = numbered(("test", 1))
    assert one == numbered(("test", 1)) != numbered(("test", 2))


def test_threads_draw_different_numbers(monkeypatch):
    monkeypatch.setattr(forms, "_NUMBERS", {})
    drawn = []

    def draw(thread):
        drawn.extend(numbered((thread, i)) for i in range(20000))

    at_once(draw, switch_s=1e-6)
    assert len({*drawn}) == 80000
