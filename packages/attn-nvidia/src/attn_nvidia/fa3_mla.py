"""fa3 over the latent cache of MLA: the rope part is K, the latent is V and joins the logits."""

from __future__ import annotations

from typing import Any

from attn_core.backends.layer_class import LayerClass
from attn_core.forward import AttentionLayer
from attn_core.kv_cache import LayerCache
from torch import Tensor

from attn_nvidia.fa3 import FA3
from attn_nvidia.fa3_plan import Call


class FA3MLA(FA3):
    """The kernel adds qv · V to q · K: q and K are the rope parts, qv and V the latents.

    All four are views of what the caller has; ragged prefill (192/128) is FA3's own.
    """

    def _in_cache(self, which: LayerClass) -> bool:
        return which.num_kv_heads == 1 and which.head_dim > which.v_head_dim >= 256

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
        pages, cut = cache.k, (layer.v_head_dim, layer.head_dim - layer.v_head_dim)
        if call.tokens:
            pages = pages.view(-1, 1, *pages.shape[2:])
        q = q if q.stride(-1) == 1 else q.contiguous()
        (q_latent, q_rope), (latent, rope) = (x.split_with_sizes(cut, -1) for x in (q, pages))
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
