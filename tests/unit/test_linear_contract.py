"""The contract of linear attention: layers, slots of a batch and the pool of states."""

import copy
import dataclasses
import pickle

import pytest
import torch
from attn_core import (
    BatchError,
    ForwardBatch,
    ForwardMode,
    Gate,
    LayerRequirements,
    LinearLayer,
    Requirements,
    SpecInfo,
    Speculation,
    StateCache,
    StatePool,
    UsageError,
    load_plugins,
    parse_device,
    select,
)

LAYER = LinearLayer(layer_id=3, num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16)
KDA = dataclasses.replace(LAYER, kind="kda")


def gate(**changes):
    return Gate(**{"A_log": torch.zeros(4), "dt_bias": torch.zeros(4), **changes})


def test_a_layer_scales_by_its_key_dim():
    assert LAYER.scale == 8**-0.5
    assert dataclasses.replace(LAYER, scale=2.0).scale == 2.0
    assert (LAYER.g_dims, KDA.g_dims) == ((4,), (4, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_v_heads": 5}, "5 value heads are no multiple of 2 key heads"),
        ({"num_k_heads": 0}, r"num_k_heads 0 \(expected an integer of 1 or more"),
        ({"head_v_dim": -1}, "head_v_dim -1"),
        ({"head_k_dim": 2.5}, "head_k_dim 2.5"),
        ({"kind": "mha"}, "kind 'mha' \\(expected 'gdn' or 'kda'"),
        ({"scale": 0.0}, r"scale 0.0 \(expected a finite number above 0"),
        ({"qk_norm": 0.0}, "qk_norm 0.0"),
        (
            {"gate": gate(), "kind": "kda"},
            r"expected \[4\] and \[4, 8\], as .*'kda'",
        ),
        ({"gate": gate(A_log=torch.zeros(2))}, r"A_log \[2\]"),
    ],
)
def test_a_layer_that_does_not_fit_itself_is_refused(changes, message):
    with pytest.raises(UsageError, match=f"layer 3: .*{message}"):
        dataclasses.replace(LAYER, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower_bound": 0.0}, r"lower_bound 0.0 \(expected a number in \[-5, 0\)"),
        ({"lower_bound": -6.0}, "lower_bound -6.0"),
        ({"A_log": torch.zeros(4, 1)}, r"A_log is torch.float32 \[4, 1\]"),
        ({"dt_bias": torch.zeros(4).int()}, r"dt_bias is torch.int32 .*\[Hv\] or \[Hv, K\]"),
    ],
)
def test_a_gate_that_does_not_exist_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        gate(**changes)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def batch(query_lens=(100, 3), mode=ForwardMode.EXTEND, **states):
    b = len(query_lens)
    return ForwardBatch.build(
        mode,
        query_lens=query_lens,
        seq_lens=query_lens,
        page_table=torch.zeros(b, 128, dtype=torch.int32),
        page_size=1,
        **states,
    )


def test_a_batch_carries_the_slots():
    states = {
        "state_slots": int32(2, -1),
        "state_slots_out": int32(3, -1),
        "state_fresh": torch.tensor([True, False]),
        "checkpoint_slots": int32(-1, 4, -1),  # 100 tokens are two chunks, 3 are one
    }
    found = batch(**states)
    assert all(getattr(found, name) is x for name, x in states.items())


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"state_slots_out": int32(0, 1)}, "state_slots_out without state_slots"),
        ({"state_slots": int32(0)}, r"state_slots has shape \(1,\)"),
        ({"state_slots": int32(0, 1), "state_slots_out": int32(1)}, r"state_slots_out has shape"),
        ({"state_slots": int32(0, 1), "state_fresh": int32(0, 1)}, "state_fresh is torch.int32"),
        ({"state_slots": int32(0, 1), "checkpoint_slots": int32(1)}, "1 slots for 3 chunks of 64"),
        (
            {"state_slots": int32(0, 1), "state_slots_out": int32(0, 1).to("meta")},
            "several devices",
        ),
    ],
)
def test_slots_that_do_not_fit_the_batch_are_refused(states, message):
    with pytest.raises(BatchError, match=message):
        batch(**states)


def test_only_an_extend_writes_checkpoints():
    with pytest.raises(BatchError, match="decode with checkpoint_slots"):
        batch((1, 1), ForwardMode.DECODE, state_slots=int32(0, 1), checkpoint_slots=int32(2, 3))
    spec = SpecInfo(topk=1, num_draft_tokens=2)
    with pytest.raises(BatchError, match="target_verify with checkpoint_slots"):
        batch(
            (2, 2),
            ForwardMode.TARGET_VERIFY,
            spec=spec,
            state_slots=int32(0, 1),
            checkpoint_slots=int32(2, 3),
        )


def pool(**changes):
    layers = [dataclasses.replace(LAYER, layer_id=i) for i in (3, 7)]
    return StatePool(**{"layers": layers, "num_slots": 5, **changes})


def test_one_tensor_of_each_kind_over_all_layers():
    found = pool(num_drafts=3, dtype="bf16", conv_channels=6)
    shapes = {n: list(x.shape) for n, x in vars(found.states).items()}
    assert shapes == {
        "state": [2, 5, 4, 16, 8],
        "u": [2, 5, 3, 4, 16],
        "k": [2, 5, 3, 2, 8],
        "g": [2, 5, 3, 4],
        "conv": [2, 5, 6, 3],
        "conv_drafts": [2, 5, 3, 6],
    }
    assert found.states.state.dtype == found.states.conv.dtype == torch.bfloat16
    assert found.states.u.dtype == found.states.k.dtype == found.states.g.dtype == torch.float32
    assert (found.num_slots, found.num_drafts, found.dtype) == (5, 3, "bf16")
    assert found.layer(7).state.data_ptr() == found.states.state[1].data_ptr()
    assert pool(layers=[KDA], num_drafts=3).layer(3).g.shape == (5, 3, 4, 8)
    assert pool().layer(3).u is None
    assert found.bytes_per_slot == found.states.nbytes // 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp16"}, r"dtype 'fp16' \(supports fp32, bf16\)"),
        ({"layers": []}, "no layers"),
        ({"layers": [LAYER, dataclasses.replace(KDA, layer_id=8)]}, "layer 3 .*layer 8 "),
        ({"num_slots": 0}, "num_slots 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        pool(**changes)


def test_a_layer_without_states_is_named():
    with pytest.raises(UsageError, match=r"layer 0 has no state \(layers: \[3, 7\]\)"):
        pool().layer(0)


def test_slots_that_fit():
    one = pool(num_drafts=4, conv_channels=6)
    arguments = {"num_drafts": 4, "conv_channels": 6}
    layers = [dataclasses.replace(LAYER, layer_id=i) for i in (3, 7)]
    fits = StatePool.slots_that_fit(10 * one.bytes_per_slot + 1, layers, **arguments)
    assert fits == 10


@pytest.mark.parametrize("layer", [LAYER, KDA], ids=lambda x: x.kind)
@pytest.mark.parametrize("drafts", [0, 4])
def test_requirements_know_the_size_of_a_slot(layer, drafts):
    one = StatePool([layer], num_slots=2, num_drafts=drafts)
    assert sum(layer.requirements.state_bytes(drafts)) == one.bytes_per_slot
    channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    needs = dataclasses.replace(layer.requirements, conv_width=4)
    for dtype in ("bf16", "fp32"):
        conv = {"conv_channels": channels, "conv_width": 4, "conv_dtype": dtype}
        one = StatePool([layer], num_slots=2, num_drafts=drafts, **conv)
        sizes = needs.state_bytes(drafts, dtype=dtype)
        assert sum(sizes) == one.bytes_per_slot
        assert sizes.conv == one.states.conv.nbytes // 2


def test_sizes_that_are_unknown():
    assert LayerRequirements(head_dim=64, num_q_heads=8, num_kv_heads=8).state_bytes() is None
    assert LayerRequirements(kind="gdn", head_dim=64).state_bytes() is None


def test_an_explanation_says_what_a_request_takes():
    layer = LayerRequirements(
        kind="gdn", head_dim=128, v_head_dim=128, num_q_heads=16, num_kv_heads=32
    )
    needs = Requirements(layers=(LayerRequirements(), layer), speculation=Speculation())
    chosen = select(needs, parse_device("cpu:avx2"), load_plugins(), {})
    said = "per request and gdn layer: 2.10 MB in fp32, 1.05 MB in bf16"
    assert f"{said}; 4 drafts add 0.10 MB\n" in chosen.explain()
    wide = dataclasses.replace(layer, conv_width=4)
    needs = dataclasses.replace(needs, layers=(LayerRequirements(), wide))
    chosen = select(needs, parse_device("cpu:avx2"), load_plugins(), {})
    assert f"{said}; convolution 0.05 MB; 4 drafts add 0.16 MB\n" in chosen.explain()
    records = 4 * 4 * (32 * 128 + 16 * 128 + 32) + 4 * 8192 * 2
    sizes = {"kind": "gdn", "state": 2097152, "conv": 3 * 8192 * 2, "records": records}
    assert chosen.to_json()["states"] == [sizes]
    softmax = select(Requirements(), parse_device("cpu:avx2"), load_plugins(), {})
    assert softmax.to_json()["states"] == []


@pytest.mark.parametrize("width", [0, -1])
def test_a_convolution_without_taps_is_refused(width):
    with pytest.raises(UsageError, match=f"conv_width {width} "):
        LayerRequirements(kind="gdn", conv_width=width)


SLOT = torch.tensor([1])


def filled(**changes):
    found = pool(conv_channels=6, num_drafts=2, **changes)
    for x in vars(found.states).values():
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.dim())))
    return found


def test_slots_are_copied_in_all_layers_as_if_all_were_read_first():
    found = filled()
    before = found.states.map(torch.clone)
    found.copy_slots(torch.tensor([1, 2]), torch.tensor([2, 4]))
    for name in ("state", "conv"):
        now, old = getattr(found.states, name), getattr(before, name)
        assert torch.equal(now[:, [2, 4]], old[:, [1, 2]])
        assert torch.equal(now[:, [0, 1, 3]], old[:, [0, 1, 3]])
    for name in ("u", "k", "g", "conv_drafts"):  # they belong to a pass
        assert torch.equal(getattr(found.states, name), getattr(before, name))


def test_cleared_slots_are_zero_even_after_nan():
    found = filled()
    before = found.states.map(torch.clone)
    found.states.state[:, 3] = torch.nan
    found.zero_slots(torch.tensor([3]))
    for name in ("state", "conv"):
        now = getattr(found.states, name)
        assert not now[:, 3].any()
        assert torch.equal(now[:, :3], getattr(before, name)[:, :3])


def test_slots_leave_for_the_host_and_come_back_elsewhere():
    found = filled(dtype="bf16")
    saved = found.to_host(torch.tensor([1, 3]))
    assert saved.state.shape == (2, 2, 4, 16, 8)
    assert saved.u is None
    before = found.states.map(torch.clone)
    found.zero_slots(torch.tensor([1, 3]))
    found.from_host(saved, torch.tensor([0, 4]))
    assert torch.equal(found.states.state[:, [0, 4]], before.state[:, [1, 3]])
    assert torch.equal(found.states.conv[:, [0, 4]], before.conv[:, [1, 3]])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_layers_of_a_copied_pool_lie_in_its_own_states(how):
    pool = StatePool([LAYER], num_slots=3, num_drafts=2)
    other = how(pool)
    other.layer(3).state[1] = 7.0
    assert (other.states.state[0, 1] == 7.0).all()
    assert not pool.states.state.any()


def test_an_engines_own_tensors_are_used_in_place():
    """Pages of an engine lie apart: layers and slots at any strides."""
    memory = torch.zeros(5, 2, 4 * 16 * 8 + 7)
    state = memory[..., : 4 * 16 * 8].view(5, 2, 4, 16, 8).transpose(0, 1)
    found = StatePool.of([3, 7], StateCache(state=state))
    found.layer(7).state[2].fill_(1)
    assert memory[2, 1].sum() == 4 * 16 * 8
    found.copy_slots(torch.tensor([2]), torch.tensor([4]))
    assert memory[4, 1].sum() == 4 * 16 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": torch.zeros(2, 5, 4, 16, 8).half()}, r"states torch.float16 .*fp32 or bf16"),
        ({"state": torch.zeros(2, 5, 4, 8, 16).mT}, "state is .*each slot contiguous"),
        ({"state": torch.zeros(3, 5, 4, 16, 8)}, r"state is \[3, 5, .*expected \[2, 5,"),
        ({"u": torch.zeros(2, 5, 3, 4, 16)}, "need all of u, k and g"),
        (
            {
                "u": torch.zeros(2, 5, 3, 4, 8),
                "k": torch.zeros(2, 5, 3, 2, 8),
                "g": torch.zeros(2, 5, 3, 4),
            },
            r"u is \[2, 5, 3, 4, 8\]",
        ),
    ],
)
def test_an_engines_tensors_that_do_not_fit_are_refused(changes, message):
    states = {"state": torch.zeros(2, 5, 4, 16, 8), **changes}
    with pytest.raises(UsageError, match=message):
        StatePool.of([3, 7], StateCache(**states))


@pytest.mark.parametrize(("slots", "cleared"), [([1, -1, 3], [1, 3]), ([-1, -1], []), ([], [])])
def test_padding_is_not_cleared(slots, cleared):
    """-1 was the last slot."""
    layer = LinearLayer(layer_id=0, num_k_heads=1, num_v_heads=1, head_k_dim=2, head_v_dim=2)
    pool = StatePool([layer], num_slots=5, conv_channels=3)
    pool.states.state.fill_(torch.nan)
    pool.states.conv.fill_(7)
    pool.zero_slots(torch.tensor(slots, dtype=torch.int64))
    is_clear = [bool((pool.states.state[:, i] == 0).all()) for i in range(5)]
    assert [i for i, x in enumerate(is_clear) if x] == cleared
    is_clear = [bool((pool.states.conv[:, i] == 0).all()) for i in range(5)]
    assert [i for i, x in enumerate(is_clear) if x] == cleared


@pytest.mark.parametrize("channels", [(0, 6), (6, 0)], ids=["pool", "copy"])
def test_a_copy_on_the_host_loses_no_convolution(channels):
    layer = LinearLayer(layer_id=0, num_k_heads=1, num_v_heads=1, head_k_dim=4, head_v_dim=4)
    source, target = (StatePool([layer], num_slots=2, conv_channels=n) for n in channels)
    saved, slots = source.to_host(torch.tensor([0])), torch.tensor([1])
    target.states.state.fill_(3)
    with pytest.raises(UsageError, match="convolution"):
        target.from_host(saved, slots)
    assert bool((target.states.state == 3).all())


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: p.zero_slots(torch.tensor([1]).int()), r"int32 \[1\] \(expected torch.int64"),
        (lambda p: p.zero_slots(torch.tensor(1)), r"int64 \[\] \(expected torch.int64 \[N\]"),
        (lambda p: p.zero_slots(torch.tensor([-2])), r"-2 to -2 \(expected -1 to 4\)"),
        (lambda p: p.to_host(torch.tensor([1, 5])), r"1 to 5 \(expected 0 to 4\)"),
        (lambda p: p.copy_slots(torch.tensor([0, -1]), torch.tensor([1, 2])), "-1 to 0 .*0 to 4"),
        (lambda p: p.copy_slots(torch.tensor([0, 1]), torch.tensor([2, -1])), "-1 to 2 .*0 to 4"),
        (
            lambda p: p.copy_slots(torch.tensor([0]), torch.tensor([1, 2])),
            r"\[2, 1, 4, 16, 8\] for 2 slots",
        ),
        (
            lambda p: p.from_host(filled(dtype="bf16").to_host(torch.tensor([0])), SLOT),
            r"bfloat16 \[2, 1, .*expected torch.float32",
        ),
        (
            lambda p: p.from_host(pool(conv_channels=5).to_host(torch.tensor([0])), SLOT),
            r"\[2, 1, 5, 3\] for 1 slots",
        ),
    ],
)
def test_slots_and_copies_that_do_not_fit_are_refused(use, message):
    """Torch's own errors came in their place, and from_host had written a part by then."""
    found = filled()
    before = found.states.map(torch.clone)
    with pytest.raises(UsageError, match=message):
        use(found)
    assert torch.equal(found.states.state, before.state)
    assert torch.equal(found.states.conv, before.conv)
