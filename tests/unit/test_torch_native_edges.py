"""torch_native where there are no keys or no sinks, and called by several threads."""

import math
import threading

import pytest
import torch
from attn_core import AttentionLayer, ForwardBatch, ForwardMode, LayerCache, load_plugins
from attn_core.testing.harness import Bench

SPEC = load_plugins().get("torch_native")
SHAPE = {"layer_id": 0, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}


def create(layer, page_size=1):
    row = next(x for x in SPEC.capabilities if x.kind == "mha" and x.device == "cpu")
    bench = Bench(spec=SPEC, row=row, torch_device=torch.device("cpu"))
    return bench.create((layer,), dtype="fp32", page_size=page_size)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("lens", [(), (0,), (3, 0, 2)])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_ragged_attention_to_no_keys_at_all(lens, cap):
    layer = AttentionLayer(**SHAPE, scale=0.2, logit_cap=cap)
    q, none = torch.randn(sum(lens), 4, 32), torch.randn(0, 2, 32)
    cu = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
    lengths = (cu, torch.zeros_like(cu), max(lens, default=0), 0)
    got, lse = create(layer).forward_ragged(
        q, none, none, layer, *lengths, causal=False, return_lse=True
    )
    assert torch.equal(got, torch.zeros(sum(lens), 4, 32))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_head_without_a_sink_and_queries_without_keys(cap):
    """A sink of -inf is none; the first two of five causal queries come before all three keys."""
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, 2.0])
    layer = AttentionLayer(**SHAPE, scale=0.2, logit_cap=cap, sinks=sinks)
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    got, lse = create(layer).forward_ragged(
        q, k, v, layer, int32(0, 5), int32(0, 3), 5, 3, causal=True, return_lse=True
    )
    assert (got[:2] == 0).all()
    assert torch.equal(lse[:2], sinks.expand(2, 4))
    assert got.isfinite().all()
    torch.testing.assert_close(got[2, 0], v[0, 0])  # one key, no sink


def test_threads_share_an_instance():
    """What one thread gathers does not lie in the buffer of another."""
    layer = AttentionLayer(**SHAPE, scale=0.2)
    backend = create(layer)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2000, 1, 2, 32).unbind(0)
    cache = LayerCache(k=k, v=v)

    def make_pass():
        lens = [700, 900, 300]
        batch = ForwardBatch.build(
            ForwardMode.DECODE,
            query_lens=[1] * 3,
            seq_lens=lens,
            page_table=torch.randint(2000, (3, 900), dtype=torch.int32),
            page_size=1,
        )
        plan = backend.init_forward_metadata(batch)
        return torch.randn(3, 4, 32), None, None, layer, cache, batch, plan

    passes, wrong = [make_pass() for _ in range(4)], []
    wanted = [backend.forward(*x) for x in passes]

    def repeat(i):
        wrong.extend(
            i for _ in range(60) if not torch.equal(backend.forward(*passes[i]), wanted[i])
        )

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
