"""flashinfer's latent attention where a tile of its kernels ends between a query's heads."""

import importlib

import pytest
import torch
from attn_core.errors import UnsupportedError
from mla_passes import BETWEEN_TILES, Pass, put_in


@pytest.mark.parametrize(("heads", "queries", "keys"), BETWEEN_TILES)
@pytest.mark.parametrize("preallocated", [False, True])
def test_heads_of_a_query_between_two_tiles_see_its_own_key(heads, queries, keys, preallocated):
    that = Pass("flashinfer", "mla-prefill", heads=(heads, 1), query_lens=queries, seq_lens=keys)
    that.check(that.backend(), preallocated=preallocated)


def test_drafts_between_two_tiles_see_their_own_key_in_a_graph():
    changes = {"heads": (20, 1), "query_lens": (7, 7), "seq_lens": (65, 129)}
    that = Pass("flashinfer", "mla-verify-chain", **changes)
    backend, batch = that.backend(), that.inputs.batch
    backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    that.check(backend, metadata=metadata)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "lost"),
    [
        (128, (0, 1), (129, 1), {(0, h) for h in range(64)}),
        (20, (9,), (67,), {(6, h) for h in range(8)}),
    ],
)
def test_the_emulated_kernels_lose_a_key_between_two_tiles(heads, queries, keys, lost):
    put_in("sm90")
    mla = importlib.import_module("flashinfer.mla")
    rng = torch.Generator().manual_seed(0)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.zeros(128 << 20, dtype=torch.uint8))
    indptr = torch.tensor([0, *queries]).cumsum(0).int()
    first = torch.arange(len(keys) + 1).int() * 3
    pages, lens = torch.arange(3 * len(keys)).int(), torch.tensor(keys).int()
    bf16 = torch.bfloat16
    q = torch.randn(sum(queries), heads, 576, generator=rng).to(bf16)
    latents = torch.randn(len(pages), 64, 576, generator=rng).to(bf16)
    tensors = [x.contiguous() for t in (q, latents) for x in t.split((512, 64), -1)]
    wrapper.plan(indptr, first, pages, lens, heads, 512, 64, 64, True, 0.04, bf16, bf16)
    _, lse = wrapper.run(*tensors, return_lse=True, return_lse_base_on_e=True)
    one = torch.tensor([0, sum(queries)]).int()
    request = next(i for i, n in enumerate(queries) if n)
    wider = torch.nn.functional.pad(q, (0, 0, 0, 128 - heads))
    tensors[:2] = [x.contiguous() for x in wider.split((512, 64), -1)]
    mine = first[request : request + 2], pages, lens[request : request + 1]
    wrapper.plan(one, *mine, 128, 512, 64, 64, True, 0.04, bf16, bf16)
    _, right = wrapper.run(*tensors, return_lse=True, return_lse_base_on_e=True)
    wrong = (lse - right[:, :heads]).abs() > 1e-4
    assert {tuple(x) for x in wrong.nonzero().tolist()} == lost


def test_more_heads_than_a_causal_tile_has_are_refused():
    that = Pass("flashinfer", "mla-prefill", heads=(160, 1))
    with pytest.raises(UnsupportedError, match=r"160 query heads .* at most 128 .* choose triton"):
        that.backend().init_forward_metadata(that.inputs.batch)
