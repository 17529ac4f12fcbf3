"""What the host does in a layer's call, counted: launches that are repeated, operators of torch.

Kernels are not run: each launch is compared with what Triton would compile for its arguments.
"""

from types import SimpleNamespace

import pytest
import torch
from attn_core.backends.rows_sparse import triton_sparse
from attn_core.cache.pool import KVPool
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from attn_core.backends.triton.sparse import hopper
from attn_core.backends.triton.sparse.backend import TritonSparse
from attn_core.ops import index, kv
from frozen_launches import Operators, recorded_launches

HEADS, TOPK, PAGE, LONG = 128, 2048, 64, 65536
PACKED = "fp8_e4m3"


@pytest.fixture
def launches(monkeypatch):
    """Let tensors of the host count as a GPU's: caches are written by kernels too."""
    for module in (kv, index):
        module._writer.cache_clear()
        monkeypatch.setattr(module, "has_triton", lambda device: True)
    with torch.no_grad(), recorded_launches() as found:
        yield found
    for module in (kv, index):
        module._writer.cache_clear()


class Chain:
    """A layer of sparse MLA over a pool, and its calls in a pass of `queries` a request."""

    def __init__(self, store="bf16", *, requests=3, queries=1, length=LONG, portable=False):
        self.layer = AttentionLayer(
            layer_id=0, num_q_heads=HEADS, num_kv_heads=1, head_dim=576, v_head_dim=512,
            scale=0.07, index_topk=TOPK,
        )  # fmt: skip
        self.pool = KVPool(
            [self.layer], num_pages=8, page_size=PAGE, kv_cache_dtype=store, kind="dsa",
            index_dim=128, index_dtype="fp8_e4m3",
        )  # fmt: skip
        config = BackendConfig(
            name="triton", row=triton_sparse()[0], layers=(self.layer,), page_size=PAGE,
            dtype="bf16", kv_cache_dtype=store, device=torch.device("cpu"), arch="sm90",
            multiprocessors=132, topk=1, num_draft_tokens=queries,
        )  # fmt: skip
        self.backend = TritonSparse(config)
        self.backend._hopper = None if portable else hopper
        routes = dict.fromkeys(("prefill", "decode", "verify"), self.backend)
        self.dispatcher = HybridDispatcher(routes, self.pool)
        self.plan(requests, queries, length)

    def plan(self, requests, queries=1, length=LONG):
        """Plan a pass of so many requests, and draw its inputs."""
        tokens = requests * queries
        mode = ForwardMode.DECODE if queries == 1 else ForwardMode.TARGET_VERIFY
        view = CacheView(
            page_table=torch.zeros(requests, length // PAGE, dtype=torch.int32),
            seq_lens=torch.full((requests,), length, dtype=torch.int32),
            out_cache_loc=torch.arange(tokens),
            max_seq_len=length,
        )
        self.batch = ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32) * queries,
            positions=torch.arange(tokens),
            max_q_len=queries,
            views={"full": view},
            spec=None if queries == 1 else SpecInfo(topk=1, num_draft_tokens=queries),
        )
        self.metadata = self.dispatcher.init_forward_metadata(self.batch)
        self.q = torch.zeros(tokens, HEADS, 576, dtype=torch.bfloat16)
        self.k = torch.zeros(tokens, 1, 576, dtype=torch.bfloat16)
        self.q_index = torch.zeros(tokens, 64, 128, dtype=torch.float8_e4m3fn)
        self.k_index = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        self.weights = torch.zeros(tokens, 64)

    def select(self, **changes):
        """Write index keys and select."""
        x = SimpleNamespace(**{**vars(self), **changes})
        index = (x.q_index, x.k_index, x.weights)
        return self.dispatcher.index_topk(*index, self.layer, self.batch, self.metadata)

    def attend(self, chosen, **changes):
        """Write latents and attend to a selection."""
        x = SimpleNamespace(**{"out": None, "return_lse": False, **vars(self), **changes})
        return self.dispatcher.forward(
            x.q, x.k, None, self.layer, self.batch, self.metadata,
            out=x.out, return_lse=x.return_lse, topk_indices=chosen,
        )  # fmt: skip


SELECTED = ["_write_index", "index_scores", "select_topk"]
ATTENDED = {
    "bf16": ["_write", "count_slots", "decode_mla_hopper", "_merge"],
    PACKED: ["_write", "decode_selected", "count_slots", "decode_mla_hopper", "_merge"],
    "portable": ["_write", "attend_selected", "_merge"],
}


SCRATCH = {"bf16": 2, PACKED: 4, "portable": 2}  # tensors, those of cut selections included


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("way", ATTENDED)
def test_a_chain_of_sparse_mla_is_launched_again(way, queries, launches):
    """Neither Triton binds arguments again, nor does torch run an operator but for new tensors."""
    chain = Chain("bf16" if way == "portable" else way, queries=queries, portable=way == "portable")
    chosen = chain.select()
    chain.attend(chosen)
    assert launches.names(slow=True) == SELECTED + ATTENDED[way]
    for requests in (3, 4):  # another size is no other kernel
        chain.plan(requests, queries)
        with Operators() as ran:
            chosen = chain.select()
        assert launches.names(slow=False) == SELECTED
        assert ran.names == ["empty"] * 3, "the selection, scores, candidates"
        with Operators() as ran:
            chain.attend(chosen)
        assert launches.names(slow=False) == ATTENDED[way]
        assert ran.names[0] == "new_empty", "the output"
        assert ran.names[1:] == ["empty"] * SCRATCH[way]
