"""fa3 over the latent cache of MLA: the rope part is K, the latent is V and joins the logits."""

from __future__ import annotations

from typing import Any

from attn_core import (
    AttentionLayer,
    BackendConfig,
    LayerCache,
    LayerGroup,
    align16,
    kernel_pages,
)
from torch import Tensor

from attn_nvidia.fa3.backend import FA3
from attn_nvidia.fa3.plan import Call


class FA3MLA(FA3):
    """The kernel adds qv · V to q · K: q and K are the rope parts, qv and V the latents.

    All four are views of what the caller has; ragged prefill (192/128) is FA3's own.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        # per layer and whether tokens are named, not pages: taking views apart costs microseconds
        self._views: dict[tuple[int, bool], tuple[LayerCache, tuple[Tensor, ...]]] = {}

    def _in_cache(self, group: LayerGroup) -> bool:
        return group.num_kv_heads == 1 and group.head_dim > group.v_head_dim >= 256

    def _run(
        self,
        call: Call,
        arguments: dict[str, Any],
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        out: Tensor | None,
        return_lse: bool,
    ) -> Any:
        cut = (layer.v_head_dim, layer.head_dim - layer.v_head_dim)
        views = self._views.get((layer.layer_id, call.tokens))
        if views is None or views[0] is not cache or views[1][0].data_ptr() != cache.k.data_ptr():
            pages = kernel_pages(cache.k, 1) if call.tokens else cache.k
            views = cache, tuple(pages.split_with_sizes(cut, -1))
            self._views[layer.layer_id, call.tokens] = views
        latent, rope = views[1]
        q_latent, q_rope = align16(q).split_with_sizes(cut, -1)
        return self._paged(
            q_rope,
            rope,
            latent,
            qv=q_latent,
            out=out,
            return_softmax_lse=return_lse,
            **arguments,
            **call.arguments,
        )
