"""Dual chunk attention: positions, scales, the cut of a pass, and what is refused."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BatchError,
    DualChunk,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Requirements,
    SpecInfo,
    Speculation,
    UnsupportedError,
    UsageError,
    cut_at_chunks,
    load_plugins,
    parse_device,
    refuse_layer,
    rotary_positions,
    select,
)

CHUNKS = DualChunk(chunk_size=24, local_size=8, original_max_position_embeddings=20)
C, L = CHUNKS.chunk_size, CHUNKS.chunk_len
HEADS, KV_HEADS, DIM = 4, 2, 16
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM,
    scale=DIM**-0.5, dual_chunk=CHUNKS,
)  # fmt: skip


def rope(x, positions):
    """Rotate [T, H, D] in float64."""
    half = x.shape[-1] // 2
    speed = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def formula(q, k, v, f):
    """The definition, pair by pair: q [n, Hq, D], k and v [n, Hkv, D], in float64."""
    n, group = len(q), HEADS // KV_HEADS
    out = torch.zeros(n, HEADS, DIM, dtype=torch.float64)
    for i in range(n):
        logits = torch.empty(HEADS, i + 1, dtype=torch.float64)
        for j in range(i + 1):
            apart = i // L - j // L
            at = i % L if apart == 0 else min(i % L + L, C) if apart == 1 else min(2 * L - 1, C)
            a = rope(q[i : i + 1], torch.tensor([at]))[0] * f
            b = rope(k[j : j + 1], torch.tensor([j % L]))[0].repeat_interleave(group, 0) * f
            logits[:, j] = (a * b).sum(-1) * DIM**-0.5
        values = v[: i + 1].repeat_interleave(group, 1)
        out[i] = torch.einsum("hs,shd->hd", logits.softmax(-1), values)
    return out


class Served:
    """A model's layer over a pool, with torch_native for every phase."""

    def __init__(self, page_size=4, layer=LAYER, pages=32):
        needs = Requirements(
            layers=(LayerRequirements.of(layer),),
            dtype="fp32",
            page_size=page_size,
            speculation=Speculation(topk=1),
        )
        registry = load_plugins()
        chosen = select(needs, parse_device("cpu"), registry, {})
        assert chosen.backend("prefill") == chosen.backend("decode") == "torch_native"
        self.pool = KVPool([layer], num_pages=pages, page_size=page_size, kv_cache_dtype="fp32")
        self.layer, self.page_size = layer, page_size
        self.dispatcher = HybridDispatcher.from_selection(chosen, registry, [layer], self.pool)
        self.table = torch.arange(1, pages, dtype=torch.int32)[None]

    def run(self, mode, length, q, k, v):
        batch = ForwardBatch.build(
            mode, query_lens=[len(q)], seq_lens=[length], page_table=self.table,
            page_size=self.page_size,
        )  # fmt: skip
        metadata = self.dispatcher.init_forward_metadata(batch)
        return self.dispatcher.forward(q, k, v, self.layer, batch, metadata)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rotated_queries_and_keys_give_the_definition(page_size):
    """A prompt in two parts, then decode: as the definition with f on both sides."""
    n, prompt = 3 * L + 5, 3 * L + 2
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, DIM, generator=rng, dtype=torch.float64)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    f = 0.1 * math.log(prompt / 20) + 1
    at_keys, at_queries = rotary_positions(CHUNKS, torch.arange(n))
    rotated = torch.stack([rope(q, p) for p in at_queries], 1) * CHUNKS.query_scale(prompt)
    keys = rope(k, at_keys)
    served, outs = Served(page_size, pages=128 // page_size), []
    cuts = [0, L + 3, prompt, *range(prompt + 1, n + 1)]
    for a, b in pairwise(cuts):
        mode = ForwardMode.EXTEND if b <= prompt else ForwardMode.DECODE
        new = (x[a:b].float() for x in (rotated, keys, v))
        outs.append(served.run(mode, b, *new))
    torch.testing.assert_close(torch.cat(outs).double(), formula(q, k, v, f), atol=2e-6, rtol=1e-5)


def test_positions_are_those_of_the_model():
    keys, (intra, succ, inter) = rotary_positions(CHUNKS, torch.tensor([0, 7, 15, 16, 47]))
    assert keys.tolist() == intra.tolist() == [0, 7, 15, 0, 15]
    assert succ.tolist() == [16, 23, 24, 16, 24]  # never beyond chunk_size
    assert inter.tolist() == [24] * 5
    narrow = DualChunk(chunk_size=20, local_size=12)
    assert rotary_positions(narrow, torch.tensor([3]))[1].tolist() == [[3], [11], [15]]


def test_near_distances_stay_true_across_a_border():
    at = torch.arange(4 * L)
    keys, (intra, succ, _) = rotary_positions(CHUNKS, at)
    for i in range(L, 4 * L):
        for j in range(max(0, i - CHUNKS.local_size), i + 1):
            query = intra if i // L == j // L else succ
            assert query[i] - keys[j] == i - j


@pytest.mark.parametrize(
    ("prompt", "f"), [(1, 1.0), (20, 1.0), (54, 0.1 * math.log(2.7) + 1), (20_000, 1.690776)]
)
def test_the_scale_of_queries_is_f_squared(prompt, f):
    assert CHUNKS.query_scale(prompt) == pytest.approx(f * f)
    assert replace(CHUNKS, original_max_position_embeddings=0).query_scale(prompt) == 1.0


@pytest.mark.parametrize("sizes", [(8, 8), (8, 9), (8, -1)])
def test_sizes_that_leave_no_chunk_are_refused(sizes):
    size, local = sizes
    with pytest.raises(UsageError, match=f"chunk_size {size}, local_size {local} .expected"):
        DualChunk(chunk_size=size, local_size=local)


def test_a_negative_trained_length_is_refused():
    with pytest.raises(UsageError, match="original_max_position_embeddings -1"):
        DualChunk(chunk_size=8, local_size=1, original_max_position_embeddings=-1)


@pytest.mark.parametrize("field", ["chunk_size", "local_size", "sparse_threshold"])
def test_a_size_that_is_no_integer_is_refused(field):
    sizes = {"chunk_size": 8, "local_size": 1, field: 4.5}
    with pytest.raises(UsageError, match=f"{field} 4.5 .expected an integer"):
        DualChunk(**sizes)


@pytest.mark.parametrize(
    "more", [{"sliding_window": 4}, {"sinks": True}, {"cross": True}, {"encoder": True}]
)
def test_only_plain_causal_layers_have_chunks(more):
    with pytest.raises(UsageError, match=f"dual chunk attention with {next(iter(more))}"):
        LayerRequirements(dual_chunk=CHUNKS, **more)
    with pytest.raises(UsageError, match="dual chunk attention with kind mla"):
        LayerRequirements(dual_chunk=CHUNKS, kind="mla")


def cut_of(query_lens, seq_lens, *, device="cpu", max_seq_len=None, page_size=4):
    table = torch.arange(1, 1 + len(seq_lens) * 32, dtype=torch.int32).view(len(seq_lens), 32)
    cu = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return cut_at_chunks(
        cu.to(device), max(query_lens), lens.to(device), table.to(device),
        max_seq_len=max_seq_len or max(seq_lens), chunk_len=L, page_size=page_size,
    )  # fmt: skip


def test_a_pass_is_cut_at_the_borders_of_chunks():
    cut = cut_of([20, 1], [L + 12, 3 * L])  # tokens 8..28 of the first, 47 of the second
    assert cut.cu_seqlens_q.tolist() == [0, 8, 20, 20, 21, 21, 21]
    intra, succ, inter = (keys.seq_lens.tolist() for keys in cut.keys)
    assert intra == [16, 12, 0, 16, 0, 0]
    assert succ == [0, 16, 0, 16, 0, 0]
    assert inter == [0, 0, 0, 16, 0, 0]
    own, before, first = (keys.page_table for keys in cut.keys)
    assert own[1].tolist() == [5, 6, 7, 8]
    assert before[1].tolist() == [1, 2, 3, 4]
    assert own[3].tolist() == [41, 42, 43, 44]
    assert first[3].tolist() == list(range(33, 65))


def test_calls_that_no_request_is_long_enough_for_are_left_out():
    assert [len(cut_of([1], [n]).keys) for n in (L, L + 1, 2 * L, 2 * L + 1)] == [1, 2, 2, 3]
    assert len(cut_of([1], [3], max_seq_len=100).keys) == 3  # what a graph may replay


def test_nothing_is_read_from_the_device():
    """A meta tensor has no values to read."""
    cut = cut_of([5, 1], [40, 40], device="meta")
    assert [keys.seq_lens.shape for keys in cut.keys] == [(4,)] * 3


def test_pages_that_do_not_divide_a_chunk_are_refused():
    plain = replace(LAYER, dual_chunk=None)
    served = Served(page_size=6, layer=plain)
    config = replace(served.dispatcher.backend("prefill").config, layers=(LAYER,))
    with pytest.raises(UnsupportedError, match="chunks of 16 tokens, which pages of 6 do not"):
        refuse_layer(config, LAYER)


def test_a_single_query_a_token_is_refused():
    served = Served()
    new = torch.zeros(3, KV_HEADS, DIM)
    with pytest.raises(
        BatchError, match=r"q is \[3, 4, 16\] .expected \[3, 3, 4, 16\].*succ and inter"
    ):
        served.run(ForwardMode.EXTEND, 3, torch.zeros(3, HEADS, DIM), new, new)


def test_five_queries_are_handed_over_as_the_first_three():
    """The model's other two are for a sparse selection: a view leaves them out, without a copy."""
    served, new = Served(), torch.randn(3, KV_HEADS, DIM)
    five = torch.randn(3, 5 * HEADS * DIM).view(3, 5, HEADS, DIM)
    want = served.run(ForwardMode.EXTEND, 3, five[:, :3].contiguous(), new, new)
    assert torch.equal(served.run(ForwardMode.EXTEND, 3, five[:, :3], new, new), want)


def test_a_tree_of_drafts_is_refused_and_a_chain_is_not():
    served = Served()
    trees = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    for mask, refused in ((trees, True), (None, False)):
        batch = ForwardBatch.build(
            ForwardMode.TARGET_VERIFY, query_lens=[2], seq_lens=[9], page_table=served.table,
            page_size=4, spec=SpecInfo(topk=1, num_draft_tokens=2, tree_mask=mask),
        )  # fmt: skip
        if refused:
            with pytest.raises(UnsupportedError, match="verifies chains, topk 1 without"):
                served.dispatcher.init_forward_metadata(batch)
        else:
            served.dispatcher.init_forward_metadata(batch)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_a_cache_is_refused(causal):
    q, k = torch.randn(6, 3, HEADS, DIM), torch.randn(6, KV_HEADS, DIM)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="layer 0: dual chunk attention without a cache"):
        Served().dispatcher.forward_ragged(q, k, k, LAYER, cu, cu, 6, 6, causal=causal)
