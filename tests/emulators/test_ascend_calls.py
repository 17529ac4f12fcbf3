"""Which requests share a call of ascend's operator, and what the installed library has."""

import pytest
import torch
from attn_ascend import calls, library
from attn_ascend.calls import calls_of, paged_calls
from attn_ascend.fused import Fused, merge_sinks
from attn_ascend.ragged import Ragged
from attn_core.errors import BackendError
from attn_core.runtime.batch import CacheView

# what the installed library has


def test_a_library_without_the_operator_is_named(vendor, monkeypatch):
    import torch_npu

    monkeypatch.delattr(torch_npu, "npu_fused_infer_attention_score_v2")
    with pytest.raises(BackendError, match=r"has no operator npu_fused\w+; install the torch-npu"):
        Fused()


def test_a_library_without_atb_is_named(vendor, monkeypatch):
    """Its functions are there and their operators are not."""
    import torch_npu

    monkeypatch.setattr(torch_npu, "_npu_paged_attention_of_atb", lambda: None, raising=False)
    with pytest.raises(BackendError, match=r"an operator of ATB; install NNAL"):
        library.operator("_npu_paged_attention_of_atb", ())


def test_an_operator_with_other_parameters_is_named(vendor):
    with pytest.raises(
        BackendError, match=r"has no parameter sinks \(it has key, value, key_cache"
    ):
        library.operator("npu_scatter_pa_kv_cache", ("key", "sinks"))


# which requests share a call


def shared(query_lens, key_lens, **more):
    """Return (packed, first request, queries, keys) of each call."""
    result = calls_of(query_lens, key_lens, **more)
    return [(c.packed, c.first_request, c.query_lens, c.key_lens) for c in result]


@pytest.mark.parametrize("packs", [True, False])
def test_a_decode_pass_is_one_call(packs):
    assert shared((1,) * 3, (9, 300, 70), packs=packs, paged=True) == [
        (False, 0, [1, 1, 1], [9, 300, 70])
    ]


def test_a_call_has_as_many_equal_requests_as_the_operator_takes(vendor, monkeypatch):
    import npu_leaf

    q, k = torch.zeros(calls.MOST_EQUAL + 1, 1, 1, 16).half(), torch.zeros(1, 1, 1, 16).half()
    k = k.expand(len(q), -1, -1, -1).contiguous()
    with pytest.raises(RuntimeError, match="B up to 65536"):
        npu_leaf.npu_fused_infer_attention_score_v2(q, k, k, input_layout="BSND")
    monkeypatch.setattr(calls, "MOST_EQUAL", 2)
    assert shared((1,) * 3, (9, 300, 70), packs=False, paged=True) == [
        (False, 0, [1, 1], [9, 300]),
        (False, 2, [1], [70]),
    ]


def test_unequal_requests_are_packed_where_the_operator_packs():
    lengths = ((5, 1, 1, 7), (9, 4, 300, 7))
    assert shared(*lengths, packs=True, paged=True) == [(True, 0, [5, 1, 1, 7], [9, 4, 300, 7])]
    assert shared(*lengths, packs=False, paged=True) == [
        (False, 0, [5], [9]),
        (False, 1, [1, 1], [4, 300]),
        (False, 3, [7], [7]),
    ]


def test_without_a_cache_equal_keys_share_a_call():
    assert shared((4, 4, 4), (4, 9, 9), packs=False, paged=False) == [
        (False, 0, [4], [4]),
        (False, 1, [4, 4], [9, 9]),
    ]


@pytest.mark.parametrize("packs", [True, False])
def test_requests_without_queries_or_keys_are_in_no_call(packs):
    result = calls_of((3, 0, 3, 3, 5), (3, 8, 3, 0, 5), packs=packs, paged=False)
    assert [(c.queries, c.keys) for c in result] == [
        ((0, 3), (0, 3)),
        ((3, 6), (11, 14)),
        ((9, 14), (14, 19)),
    ]


@pytest.mark.parametrize("packs", [True, False])
def test_causal_queries_before_the_first_key_are_in_no_call(packs):
    result = calls_of((2, 5, 5, 3), (2, 3, 9, 0), packs=packs, paged=False, causal=True)
    if packs:
        assert [(c.queries, c.keys, c.query_lens) for c in result] == [
            ((0, 2), (0, 2), [2]),
            ((4, 12), (2, 14), [3, 5]),
        ]
    else:
        assert [(c.queries, c.keys) for c in result] == [
            ((0, 2), (0, 2)),
            ((4, 7), (2, 5)),
            ((7, 12), (5, 14)),
        ]


def test_a_sink_of_no_weight_leaves_a_query_without_keys_at_zero():
    """-inf less -inf is no number."""
    lse, sinks = torch.tensor([[-torch.inf, 1.0]]), torch.tensor([-torch.inf, -torch.inf])
    out = torch.tensor([[[0.0], [3.0]]])
    result, sums = merge_sinks(out, lse, sinks)
    assert torch.equal(result, out)
    assert torch.equal(sums, lse)


def test_a_packed_call_has_a_largest_number_of_requests(monkeypatch):
    monkeypatch.setattr(calls, "MOST_PACKED", 2)
    result = calls_of((3, 4, 5), (3, 4, 5), packs=True, paged=True)
    assert [(c.requests, c.queries) for c in result] == [
        (slice(0, 2), (0, 7)),
        (slice(2, 3), (7, 12)),
    ]


@pytest.mark.parametrize("window", [4, 128, 129, 130, 1000])
def test_a_lone_query_reads_the_pages_of_its_window(window):
    lengths = (258, 7)
    table = torch.tensor([[4, 8, 6], [2, 0, 0]], dtype=torch.int32)
    view = CacheView.build(page_table=table, page_size=128, seq_lens=lengths, new_lens=(1, 1))
    [call] = paged_calls((1, 1), view, table, window, packs=True)
    skipped = max(258 - window, 0) // 128
    assert call.key_lens == [258 - 128 * skipped, 7]
    assert call.table.tolist()[0][: 3 - skipped] == [4, 8, 6][skipped:]
    seen = [slots[:n] for slots, n in zip(~call.mask[:, 0, 0], call.key_lens, strict=True)]
    assert [int(x.sum()) for x in seen] == [min(n, window) for n in lengths]
    assert all(x[-1] for x in seen)


def test_lengths_are_read_once_for_all_layers(vendor):
    ragged = Ragged(None)

    def key_lens(ends):
        return [n for call in ragged._calls(ends, ends, False, False) for n in call.key_lens]

    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    first = ragged._calls(ends, ends, False, False)
    assert ragged._calls(ends, ends, False, False) is first
    assert ragged._calls(ends, ends, True, False) is not first
    assert ragged._calls(ends, ends, False, True) is not first
    assert ragged._calls(ends, ends.clone(), False, False) is not first
    assert key_lens(ends) == [3, 4]
    ends[2] = 9
    assert key_lens(ends) == [3, 6]
    with torch.inference_mode():
        ends = torch.tensor([0, 3, 7], dtype=torch.int32)
        assert key_lens(ends) == [3, 4]
        ends[2] = 9
        assert key_lens(ends) == [3, 6]
