"""Sparse MLA in SGLang: its pool of index keys, a pass with padding, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.pool import EnginePool
from attn_core.integrations.sglang.server import check_sparse
from attn_core.integrations.sglang.sparse import select
from attn_core.ops.index import write_index
from attn_core.ops.kv import read_kv
from engine_passes import Pass, attention, dense, dsa_pool, runner, server_args
from engine_sparse import rotate, stored
from sglang.kernels.ops.attention.dsa.index_buf_accessor import GetK, GetS
from sglang.srt.model_executor.forward_batch_info import ForwardMode

TOPK, HEADS = 16, 4
CONFIG = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK)
PREFILL = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))


def bound(pool, layers=1):
    """Return a layer of SGLang's pool as the adapter hands it out."""
    module = attention(0, heads=4, kv_heads=1, dim=80, v_head_dim=64)
    backend = AttnCoreBackend(runner([module], pool, 64, config=CONFIG))
    return module, backend


def test_index_keys_lie_where_sglangs_own_readers_look():
    pool = dsa_pool()
    _module, backend = bound(pool)
    torch.manual_seed(0)
    keys, slots = torch.randn(100, 128), torch.randperm(190)[:100] + 128  # pages 2, 3 and 4
    write_index(backend.pool.layer(0), keys, slots)
    pages, buffer = torch.tensor([2, 3, 4]), pool.get_index_k_with_scale_buffer(0)
    values = GetK.slow(pool, buffer, 192, pages).view(torch.float8_e4m3fn).double()
    scales = GetS.slow(pool, buffer, 192, pages).view(torch.float32).double().view(-1, 1)
    assert torch.equal((values * scales)[slots - 128], stored(keys))


@pytest.mark.parametrize("padding", [0, 3])
def test_a_pass_attends_to_what_it_selects(padding):
    """Two prompts, one of fewer tokens than are selected; then a token for each."""
    torch.manual_seed(1)
    pool = dsa_pool()
    module, backend = bound(pool)
    run = SimpleNamespace(req_to_token_pool=backend.req_to_token_pool)
    table, lens = run.req_to_token_pool.req_to_token, {1: 40, 2: 9}
    keys = {row: torch.randn(n + 1, 128) for row, n in lens.items()}
    latents = {row: torch.randn(n + 1, 1, 80) for row, n in lens.items()}

    def step(mode, first, end):
        new = [slice(first(n), end(n)) for n in lens.values()]
        counts = tuple(x.stop - x.start for x in new)
        made = Pass(mode, (1, 2), tuple(x.start for x in new), counts, padding=padding)
        batch = made.batch(run)

        def rows(of, *shape):
            own = [of[row][x] for row, x in zip(lens, new, strict=True)]
            return torch.cat([*own, torch.full((padding, *shape), torch.nan)])

        total = sum(counts) + padding
        q, index, gates = (torch.randn(total, *x) for x in ((4, 80), (HEADS, 128), (HEADS,)))
        backend.init_forward_metadata(batch)
        chosen = select(backend, index, rows(keys, 128), gates, 0)
        assert chosen.shape == (sum(counts), TOPK)
        call = backend.forward_extend if mode.is_extend() else backend.forward_decode
        k = rows(latents, 1, 80)
        out = call(q.flatten(1), k, k[..., :64], module, batch, topk_indices=chosen)
        assert not out[sum(counts) :].any()
        token = 0
        for row, span in zip(lens, new, strict=True):
            seen_keys, values = stored(keys[row]), latents[row].bfloat16().float()
            for at in range(span.start, span.stop):
                products = torch.einsum("hd,nd->hn", index[token].double(), seen_keys[: at + 1])
                best = (gates[token].double() @ products.relu()).argsort(descending=True)[:TOPK]
                assert sorted(table[row][best].tolist()) == [x for x in chosen[token] if x >= 0]
                own = values[best]
                visible = torch.ones(1, len(best), dtype=torch.bool)
                answer = dense(q[token : token + 1], own, own[..., :64], visible, module.scaling)
                torch.testing.assert_close(out[token].double(), answer.flatten(), atol=1e-5, rtol=0)
                token += 1
        return chosen

    chosen = step(ForwardMode.EXTEND, lambda n: 0, lambda n: n)
    assert (chosen >= 0).sum(1).tolist()[:18] == [*range(1, 17), 16, 16]
    step(ForwardMode.DECODE, lambda n: n, lambda n: n + 1)
    latent = read_kv(backend.pool.layer(0), table[1, :41].long(), torch.float32)[0]
    assert torch.equal(latent.view(41, 80), latents[1].bfloat16().float().view(41, 80))


def test_a_short_prompt_attends_to_all_keys_and_stores_its_index_keys():
    pool = dsa_pool()
    _module, backend = bound(pool)
    made = Pass(ForwardMode.EXTEND, (1,), (0,), (TOPK,))
    backend.init_forward_metadata(made.batch(backend))
    index = torch.randn(TOPK, HEADS, 128), torch.randn(TOPK, 128), torch.randn(TOPK, HEADS)
    assert select(backend, *index, 0) is None
    assert pool.get_index_k_with_scale_buffer(0).any()
    backend._pass = None  # an idle rank
    assert select(backend, *index, 0) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"get_attention_backends": lambda: ("dsa", "attn_core")}, "another backend for one phase"),
        ({"speculative_algorithm": "EAGLE"}, "speculation"),
        ({"cuda_graph_config": PREFILL}, "CUDA graphs of prefill .--cuda-graph-backend-prefill"),
    ],
)
def test_what_is_not_served_beside_sparse_mla_is_refused_by_name(changed, said):
    args = server_args(**changed)
    with pytest.raises(UnsupportedError, match=rf"index_topk 16.*{said}.*use --attention-back"):
        check_sparse(args, CONFIG)
    assert check_sparse(server_args(), CONFIG) == TOPK


def test_keys_that_are_always_selected_are_refused():
    config = SimpleNamespace(**vars(CONFIG), index_init_tokens=4)
    with pytest.raises(UnsupportedError, match=r"keys that are always selected .index_init"):
        check_sparse(server_args(), config)


def test_an_fp8_cache_of_sparse_mla_is_refused():
    with pytest.raises(UnsupportedError, match=r"a scale per 128 .* --kv-cache-dtype bfloat16"):
        EnginePool(dsa_pool(dtype=torch.float8_e4m3fn), 64, torch.device("cpu"))


def test_the_stand_in_of_the_hadamard_transform_is_orthogonal():
    eye = rotate(torch.eye(128))
    torch.testing.assert_close(eye @ eye.T, torch.eye(128))
    assert eye.abs().unique().numel() == 1
