"""An attention backend of SGLang that keeps every key itself and takes a dense softmax."""

import torch
from engine_passes import dense
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)


class DenseBackend(AttentionBackend):
    """Reads no table and no pool, so it shares no mistake with the backend beside it."""

    def __init__(self, runner):
        self.token_to_kv_pool = runner.token_to_kv_pool  # the models of SGLang ask for both
        self.req_to_token_pool = runner.req_to_token_pool
        self.seen = {}
        self.index_keys, self.chosen = {}, {}  # of sparse MLA: by layer and row of SGLang's tables

    def init_forward_metadata(self, forward_batch):
        pass

    @staticmethod
    def counts(forward_batch):
        """Return the queries of each request."""
        if forward_batch.forward_mode.is_decode():
            return [1] * forward_batch.batch_size
        return forward_batch.extend_seq_lens.tolist()

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, topk_indices=None
    ):
        rows, counts = forward_batch.req_pool_indices.tolist(), self.counts(forward_batch)
        if topk_indices is not None:  # SGLang's pool of sparse MLA holds bfloat16
            k, v = (x.bfloat16().to(x.dtype) for x in (k, v))
        kv_heads = layer.tp_k_head_num
        parts = zip(
            rows,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(counts),
            k.view(-1, kv_heads, layer.qk_head_dim).split(counts),
            v.reshape(-1, kv_heads, layer.v_head_dim).split(counts),
            strict=True,
        )
        source = None if topk_indices is None else int(topk_indices)
        outs = [self._request(layer, sinks, source, *part) for part in parts]
        return torch.cat(outs).flatten(1).to(q.dtype)

    forward_decode = forward_extend

    def _request(self, layer, sinks, source, row, q, k, v):
        """Attend to all keys that a request has had, or to those that the layer `source` chose."""
        key = layer.layer_id, row
        if key in self.seen:
            k, v = (torch.cat(pair) for pair in zip(self.seen[key], (k, v), strict=True))
        self.seen[key] = k, v
        position = torch.arange(len(k))
        own = position[len(k) - len(q) :, None]
        visible = position <= own
        if layer.sliding_window_size > -1:
            visible &= position >= own - layer.sliding_window_size
        if source is not None:
            visible &= self.chosen[source, row]
        return dense(q, k, v, visible, layer.scaling, sinks, layer.logit_cap or None)


def register_as(name):
    """Let SGLang create this backend for one of its own names, whose lists are passed then.

    MLA comes with absorbed heads always, since unfolded ones leave no latents behind.
    """
    register_attention_backend(name)(DenseBackend)
    AttentionBackendRegistry.register(name, lambda attn, batch: AttnForwardMethod.MLA)
