"""Whether tensors have the form of others, by torch's guards and without them."""

import pytest
import torch
from attn_core.ops import forms
from attn_core.ops.forms import form_of, same_form


@pytest.fixture(params=["guards", "attributes", "amd"], autouse=True)
def way(request, monkeypatch):
    """Compare by what torch has, by attributes where it lacks it, and as on AMD's GPUs."""
    if request.param == "attributes":
        monkeypatch.setattr(forms, "_GUARDS", None)
    monkeypatch.setattr(forms, "_ON_AMD", request.param == "amd")
    return request.param


def tensors():
    return torch.zeros(6, 4, 8), torch.zeros(6, 8, dtype=torch.int64)


OTHERS = {
    "tokens": lambda x: torch.zeros(5, 4, 8),
    "heads": lambda x: torch.zeros(6, 3, 8),
    "dtype": lambda x: x.half(),
    "bits": lambda x: x.view(torch.int32),
    "strides": lambda x: torch.zeros(6, 8, 4).transpose(1, 2),
    "spread": lambda x: torch.zeros(6, 4, 16)[..., :8],
    "columns": lambda x: torch.zeros(6, 4, 16)[..., ::2],
    "device": lambda x: torch.zeros(6, 4, 8, device="meta"),
    "gradients": lambda x: torch.zeros(6, 4, 8, requires_grad=True),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "dimensions": lambda x: x[..., None],
}


def test_tensors_elsewhere_have_the_form():
    fits = same_form(*tensors())
    for _ in range(2):
        assert fits(*tensors())
    x, y = tensors()
    assert fits(torch.zeros(7, 4, 8)[1:], y)
    assert not fits(y, x)


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_is_told_apart(name):
    x, y = tensors()
    assert not same_form(x, y)(OTHERS[name](x), y)
    assert not same_form(y, x)(y, OTHERS[name](x))


@pytest.mark.parametrize("name", OTHERS)
def test_every_form_is_its_own(name):
    x = OTHERS[name](tensors()[0])
    assert same_form(x)(x)
    assert not same_form(x)(tensors()[0])


def test_dimensions_of_size_one_count_by_their_strides():
    fits = same_form(torch.zeros(1, 1, 8))
    assert fits(torch.zeros(1, 1, 8))
    assert not fits(torch.zeros(1, 2, 8)[:, :1])
    assert not fits(torch.zeros(2, 1, 16)[:1, :, :8])


def test_it_may_say_no_in_another_mode_and_is_right_when_it_says_yes():
    made = tensors()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            fits = same_form(*made)
            assert fits(*made)
            assert not fits(OTHERS["heads"](made[0]), made[1])
            fresh = same_form(*tensors())
            assert fresh(*tensors())


def test_a_guard_that_fails_is_replaced(monkeypatch):
    def broken(*tensors, **more):
        raise TypeError("another torch")

    monkeypatch.setattr(forms, "_GUARDS", broken)
    test_tensors_elsewhere_have_the_form()


def test_the_number_of_a_form_leaves_the_tokens_out():
    x, y = tensors()
    assert form_of(x, None, y) == form_of(torch.zeros(5, 4, 8), None, y) == form_of(x, None, y[:2])
    for name in OTHERS.keys() - {"tokens", "gradients", "parameter"}:
        assert form_of(OTHERS[name](x), None, y) != form_of(x, None, y), name
    assert form_of(x, y) != form_of(x, None, y)


def test_large_storages_are_told_apart_on_amd(way):
    """There Triton compiles 32-bit offsets for those of less than 2 GiB."""
    large = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")[:64]
    small = torch.empty(64, dtype=torch.bfloat16, device="meta")
    assert same_form(large)(small) is (way != "amd")
    assert (form_of(large) == form_of(small)) is (way != "amd")
