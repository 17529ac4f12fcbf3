"""Dual chunk attention in SGLang: the scale of long requests, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.dual_chunk import DualChunkModel, check_dual_chunk
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.dual_chunk import DualChunk
from engine_passes import server_args

CHUNKS = DualChunk(48, 16, original_max_position_embeddings=100)
CONFIG = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
LAYER = AttentionLayer(
    layer_id=3, num_q_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, scale=1.0
)


@pytest.mark.parametrize("decodes", [False, True])
def test_queries_have_the_scale_of_their_request(decodes):
    """In prefill that of the whole prompt, in decode that of its length now."""
    model = DualChunkModel(CHUNKS, {}, 1000)
    layer = model.layer(LAYER)
    lengths, counts = (50, 400), (1, 1) if decodes else (3, 2)
    tokens = sum(counts)
    batch = SimpleNamespace(
        num_tokens=tokens,
        batch_size=2,
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        cu_seqlens_q=torch.tensor([0, counts[0], tokens], dtype=torch.int32),
        views={"full": SimpleNamespace(seq_lens=torch.tensor(lengths if decodes else (3, 9)))},
    )
    engine_batch = SimpleNamespace(orig_seq_lens=torch.tensor((7, 7) if decodes else lengths))
    q = torch.randn(tokens + 2, 5 * 2 * 8)  # two rows of padding
    scales = torch.tensor([CHUNKS.query_scale(n) for n in lengths])
    assert scales[0] == 1 < scales[1]
    per_token = scales.repeat_interleave(torch.tensor(counts))[:, None, None, None]
    expected = q[:tokens].view(tokens, 5, 2, 8)[:, :3] * per_token
    torch.testing.assert_close(model.queries(q, layer, engine_batch, batch), expected)
    assert torch.equal(  # a context within the trained length
        DualChunkModel(CHUNKS, {}, 100).queries(q, layer, engine_batch, batch),
        q[:tokens].view(tokens, 5, 2, 8)[:, :3],
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculation"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"get_attention_backends": lambda: ("fa3", "attn_core")}, "another backend for one phase"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changed, said):
    with pytest.raises(UnsupportedError, match=rf"{said}; use --attention-backend dual_chunk"):
        check_dual_chunk(server_args(**changed), CONFIG, CHUNKS)
    check_dual_chunk(server_args(), CONFIG, CHUNKS)


def test_sparse_prompts_come_whole():
    sparse = DualChunk(48, 16, sparse_threshold=64)
    whole = {"disable_radix_cache": True, "chunked_prefill_size": -1}
    check_dual_chunk(server_args(**whole), CONFIG, sparse)
    with pytest.raises(UnsupportedError, match="with --disable-radix-cache, or let"):
        check_dual_chunk(server_args(**whole | {"disable_radix_cache": False}), CONFIG, sparse)
    with pytest.raises(UnsupportedError, match="with --chunked-prefill-size -1, or let"):
        check_dual_chunk(server_args(**whole | {"chunked_prefill_size": 8192}), CONFIG, sparse)
