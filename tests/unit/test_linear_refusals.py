"""What linear layers cannot run on is refused with a sentence, before a state is written."""

import dataclasses

import pytest
import torch
from attn_core import (
    BackendError,
    BackendRunError,
    BatchError,
    LinearAttentionBackend,
    LinearRoutes,
    StatePool,
    UnsupportedError,
    UsageError,
)
from attn_core.backends.torch_native.linear import TorchNativeLinear
from linear_passes import (
    GDN,
    HV,
    KDA,
    K,
    M,
    V,
    config,
    inputs,
    int32,
    make_batch,
    make_pool,
    speculation,
    tree_mask,
)
from linear_serving import Recording, forward, linear, serving


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def planning(batch, **changes):
    return serving(**changes)[0].init_forward_metadata(batch)


def test_a_pass_that_the_row_cannot_run_is_refused():
    decode = make_batch(M.DECODE, [1], (0,))
    slotless = dataclasses.replace(decode, state_slots=None)
    with pytest.raises(BatchError, match="decode without state_slots: the model has linear layers"):
        planning(slotless)
    separate = dataclasses.replace(decode, state_slots_out=int32(1))
    with pytest.raises(UnsupportedError, match=r"writes a state where it has read.*copy_slots"):
        planning(separate, separate_write_slots=False)
    saves = make_batch(M.EXTEND, [64], (0,), checkpoint_slots=int32(1))
    with pytest.raises(UnsupportedError, match="writes no checkpoints"):
        planning(saves, checkpoints=False)
    verify = make_batch(M.TARGET_VERIFY, [3], (0,), spec=speculation([-1, 0, 0]))
    with pytest.raises(UnsupportedError, match="verifies chains"):
        planning(verify, max_verify_topk=1)
    chain = make_batch(M.TARGET_VERIFY, [3], (0,), spec=speculation(3))
    with pytest.raises(UnsupportedError, match="no backend for linear_verify"):
        planning(chain, verify=False)
    many = make_batch(M.TARGET_VERIFY, [4], (0,), spec=speculation(4))
    with pytest.raises(UsageError, match=r"4 drafts for a pool of 3; create .* num_drafts=4"):
        planning(many)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pool": StatePool([KDA], num_slots=2)}, UsageError, "a pool for 0 drafts"),
        ({"pool": StatePool([GDN], num_slots=2, num_drafts=2)}, UsageError, "num_drafts=3"),
        ({"pool": StatePool([KDA], num_slots=2, num_drafts=3)}, UsageError, "decays"),
        (
            {"pool": StatePool([dataclasses.replace(GDN, head_v_dim=8)], num_slots=2)},
            UsageError,
            r"states \[2, 6, 8, 16\] \(expected \[slots, 6, 24, 16\]",
        ),
        (
            {"pool": StatePool([dataclasses.replace(GDN, layer_id=5)], num_slots=2)},
            UsageError,
            "layer 0 has no state",
        ),
        ({"kv_dtypes": {"bf16"}}, UnsupportedError, "states in fp32: .*supports bf16"),
        ({"head_dim_pairs": set()}, UnsupportedError, "layer 0 needs head_dim 16/24"),
        ({"kind": "kda"}, UnsupportedError, "layer 0 needs kind gdn"),
    ],
)
def test_a_pool_or_a_layer_that_does_not_fit_is_refused_at_once(changes, error, message):
    with pytest.raises(error, match=message):
        linear(**changes)


def test_both_phases_are_required():
    with pytest.raises(UsageError, match="no backend for 'linear_decode'"):
        LinearRoutes({"linear_prefill": TorchNativeLinear(config(GDN))}, make_pool(GDN))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[:, :1], r"q is \[2, 1, 16\] \(expected \[2, 2, 16\]"),
        ("k", lambda x: x[:1], r"k is \[1, 2, 16\]"),
        ("v", lambda x: x[..., :8], r"v is \[2, 6, 8\]"),
        ("g", lambda x: x[..., None], r"g is \[2, 6, 1\]"),
        ("beta", lambda x: x[:, :2], r"beta is \[2, 2\]"),
        ("beta", lambda x: x.bfloat16(), "beta torch.bfloat16 .*after the sigmoid"),
        ("out", lambda x: torch.zeros(2, HV, K), r"out is \[2, 6, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name, change, message):
    names = dict(zip(("q", "k", "v", "g", "beta"), inputs(GDN, 2), strict=True))
    names[name] = change(names.get(name))
    out = names.pop("out", None)
    with pytest.raises(BatchError, match=f"layer 0: .*{message}"):
        forward(serving()[0], make_batch(M.DECODE, [1, 1], (0, 1)), names.values(), out=out)


class Wrong(Recording):
    def decode(self, q, *args, out=None):
        return q


class Unfilled(Recording):
    def decode(self, q, *args, out=None):
        return q.new_zeros(len(q), HV, V)


class Failing(Recording):
    def decode(self, q, *args, out=None):
        raise RuntimeError("bang")


def test_a_backend_that_breaks_the_contract_or_fails_is_named():
    batch = make_batch(M.DECODE, [1], (0,))
    with pytest.raises(BackendError, match=r"decoder returned \[1, 2, 16\] .*\[1, 6, 24\]"):
        forward(serving(backend=Wrong)[0], batch, inputs(GDN, 1))
    dispatcher, out = serving(backend=Unfilled)[0], torch.zeros(1, HV, V)
    forward(dispatcher, make_batch(M.EXTEND, [1], (0,)), inputs(GDN, 1), out=out)
    with pytest.raises(BackendError, match=r"decoder returned a new tensor .*one given as `out`"):
        forward(dispatcher, batch, inputs(GDN, 1), out=out)
    with pytest.raises(BackendRunError, match="decoder failed in decode, layer 0, a decode pass"):
        forward(serving(backend=Failing)[0], batch, inputs(GDN, 1))


def test_a_backend_that_does_not_verify_says_so():
    class Plain(LinearAttentionBackend):
        init_forward_metadata = extend = decode = None

    backend = Plain(config(GDN))
    with pytest.raises(UnsupportedError, match="torch_native does not verify drafts"):
        backend.verify(*inputs(GDN, 1), GDN, None, None, None)
    with pytest.raises(UnsupportedError, match="torch_native does not verify drafts"):
        backend.commit(None, None, None, torch.tensor([0]))


@pytest.mark.parametrize(
    ("slots", "states", "message"),
    [
        ((0, 9), {}, r"state slot 9 \(expected -1 to 7\)"),
        ((0, -2), {}, "state slot -2"),
        ((1, 1), {}, "written: one of them more than once"),
        ((0, 1), {"state_slots_out": int32(2, -1)}, "-1 in one of them alone"),
        ((0, 1), {"state_slots_out": int32(2, 0)}, "slot 0 is read by one request and written"),
        ((2, 2), {"state_slots_out": int32(2, 3)}, "slot 2 is read by one request and written"),
        ((2, 2), {"state_slots_out": int32(3, 2)}, "slot 2 is read by one request and written"),
    ],
)
@pytest.mark.parametrize("check_values", [True, False])
def test_slots_that_collide_are_found_on_a_cpu(slots, states, message, check_values):
    """torch would take -1 for the last slot, which is another request's."""
    batch = make_batch(M.DECODE, [1, 1], slots, **states)
    with pytest.raises(BatchError, match=message):
        planning(batch, check_values=check_values)
    fits = make_batch(M.DECODE, [1, 1], (2, 2), state_slots_out=int32(0, 1))
    planning(fits, check_values=check_values)


def test_a_draft_before_its_parent_is_found_when_values_are_checked():
    spec = speculation([-1, 0, 0])
    good = make_batch(M.TARGET_VERIFY, [3], (0,), spec=spec)
    planning(good, check_values=True)
    mask = tree_mask([-1, 0, 0]).flip(1, 2).contiguous()
    spec = dataclasses.replace(spec, tree_mask=mask)
    with pytest.raises(BatchError, match="each draft after its parent"):
        planning(make_batch(M.TARGET_VERIFY, [3], (0,), spec=spec), check_values=True)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (3, lambda g: g.exp(), "natural log of a decay"),
        (3, lambda g: g * torch.nan, "g up to nan"),
        (1, lambda k: 3 * k, r"beta·\|k\|² up to .*normalise the keys, or set qk_norm"),
    ],
)
def test_values_out_of_range_are_found_when_values_are_checked(index, change, message):
    tensors = list(inputs(GDN, 2, hard=True))
    batch = make_batch(M.DECODE, [1, 1], (0, 1))
    dispatcher, _ = serving(check_values=True)
    forward(dispatcher, batch, tensors)
    tensors[index] = change(tensors[index])
    with pytest.raises(BatchError, match=message):
        forward(dispatcher, batch, tensors)
