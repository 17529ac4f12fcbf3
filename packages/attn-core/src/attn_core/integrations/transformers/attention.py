"""The functions and the cache layer that connect a transformers model to the pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers import compiled, linear, mla, vision
from attn_core.integrations.transformers.architectures import check_decoder, none_if_off
from attn_core.integrations.transformers.paged_cache import PagedCache
from attn_core.integrations.transformers.sequences import Sequences
from attn_core.runtime.layer import AttentionLayer

NAME = "attn_core"  # the attention implementation's name inside transformers
ENABLED = "_attn_core_enabled"  # on the decoder of a model under enable()
_TAG = "_attn_core_layer"  # on the keys that a paged cache layer hands on
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # mark several sequences in a row


def register() -> None:
    """Register the attentions and the decoder's mask by name; again is harmless."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)
    AttentionInterface.register(vision.NAME, vision.attention)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """One layer of a transformers cache whose tokens lie in pages.

    Length, order and pages are the business of `requests`, which all layers share; the first
    layer passes on what transformers asks of every layer in turn. latent: MLA, whose new keys and
    values are the latent and the rotated key.
    """

    supports_early_init = False

    def __init__(self, requests: Sequences, layer: AttentionLayer, *, latent: bool) -> None:
        self.is_initialized = False  # as the base class, which would also set keys and values
        self.requests, self.layer, self.latent = requests, layer, latent
        self.is_sliding = layer.sliding_window is not None
        self.is_croppable = requests.can_crop
        self._leads = layer.layer_id == requests.first_layer_id

    @property
    def keys(self) -> Tensor:
        """Refuse: keys and values of a row lie in pages, of which the pool has many."""
        raise UnsupportedError(
            "the keys and values of a paged cache lie in pages of attn-core's pool, not in its "
            "layers; to read or copy them, run the prompt after disable()"
        )

    values = keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pool is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values on, tagged with this layer; the attention writes them."""
        _ = self.requests.current  # refused outside of a pass
        keys = key_states.view_as(key_states)
        setattr(keys, _TAG, self)
        return keys, value_states

    def get_seq_length(self) -> int:
        """Return the columns seen so far, padding included, as transformers counts."""
        return self.requests.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the keys."""
        return self.requests.columns + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: pages are the only limit."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep the pages behind the window until the next crop."""
        if self._leads:
            self.requests.keep_past()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns."""
        if self._leads:
            self.requests.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from row beam_idx[i]."""
        if self._leads and self.requests.batch_size:
            rows = torch.arange(self.requests.batch_size, device="cpu")
            self.requests.choose(rows.index_select(0, beam_idx.cpu()).tolist())  # refuses others

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, numbers or a mask of rows, as a tensor is indexed."""
        if self._leads and self.requests.batch_size:
            rows = torch.arange(self.requests.batch_size, device="cpu")
            self.requests.choose(rows[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, its copies side by side."""
        if self._leads:
            rows = range(self.requests.batch_size)
            self.requests.choose([row for row in rows for _ in range(repeats)])

    def reset(self) -> None:
        """Forget all tokens."""
        if self._leads:
            self.requests.release()

    def offload(self) -> None:
        """Refuse: pages stay where the pool is."""
        raise UnsupportedError("a paged cache cannot be offloaded; use cache_implementation=None")

    prefetch = offload


def adopt(cache: Any, memory: PagedCache, config: Any) -> Sequences:
    """Return the requests of a cache, after giving an empty one paged layers.

    config: of the decoder. Raises UnsupportedError for a cache of another kind or another model.
    """
    layers = getattr(cache, "layers", ())
    paged = next((x for x in layers if isinstance(x, PagedLayer)), None)
    if paged is not None:
        if not paged.requests.belong_to(memory):
            raise UnsupportedError(
                "this cache lies in the pool of another model; start a new cache"
            )
        return paged.requests
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedError(
            f"a {type(cache).__name__}{', offloaded' * getattr(cache, 'offloading', False)} "
            "(supports DynamicCache); leave past_key_values and cache_implementation out"
        )
    if cache.get_seq_length():
        raise UnsupportedError(
            f"this cache holds {cache.get_seq_length()} tokens that were computed without "
            "attn-core; start a new cache"
        )
    requests = Sequences(memory)
    if any(getattr(x, "record_past", False) for x in layers):
        requests.keep_past()
    layers = list(layers or DynamicCache(config=config).layers)
    n = len(layers)  # fewer than the model has, where an assistant exits early
    for x in (x for x in memory.layers if x.layer_id < n):
        layers[x.layer_id] = PagedLayer(requests, x, latent=memory.kind != "mha")
    for y in (y for y in memory.linear_layers if y.layer_id < n):
        layers[y.layer_id] = linear.StateLayer(requests, y)
    cache.layers, cache.layer_class_to_replicate = layers, None
    return requests


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, Hq, T, D] over the pages of the layer that tagged `key`.

    indices: int32 [B, T, K], what the indexer of sparse MLA returned.
    Returns [B, T, Hq, Dv], zeros in padded rows. Raises UnsupportedError for anything asked of
    this layer that its AttentionLayer does not say: nothing is dropped.
    """
    paged: PagedLayer | None = getattr(key, _TAG, None)
    if paged is None:
        raise UnsupportedError(
            f"{type(module).__name__} attends without a paged cache layer; call enable(model) for "
            "generate() and forward passes, generate_batch() needs no more; attn-core runs "
            "decoders whose layers all go through past_key_values"
        )
    x, new_values = paged.layer, None if paged.latent else value
    if paged.latent:
        query, key = mla.absorb(module, query, key, value)
    v_head_dim = x.v_head_dim if new_values is None else new_values.shape[3]
    check_call(
        x,
        (query.shape[1], key.shape[1], query.shape[3], v_head_dim),
        (scaling, sliding_window, softcap, s_aux, dropout, is_causal),
    )
    biased = kwargs.get("position_bias") is not None
    if biased or (attention_mask is not None and attention_mask.numel() > 0):
        raise UnsupportedError(
            f"a custom mask ({'position_bias' if biased else 'attention_mask'}) in layer "
            f"{x.layer_id}; attn-core takes a 2-D attention_mask that marks padding"
        )
    if x.index_topk is not None:
        new_values = indices  # the values are part of the keys
    if torch.compiler.is_compiling():
        out = compiled.attend(query, key, new_values, x, paged.requests.pool)
    else:
        out = paged.requests.current.attend(query, key, new_values, x)
    return mla.project(module, out) if paged.latent else out, None


def check_call(
    x: AttentionLayer, shape: tuple[int, int, int, int], options: tuple[Any, ...]
) -> None:
    """Raise UnsupportedError where a layer is called for anything but what it was enabled for.

    shape: heads, KV heads, D, Dv. options: scale, window, softcap, sinks, dropout, causal.
    """
    scaling, window, softcap, sinks, dropout, is_causal = options
    call = (
        *(*shape, scaling, none_if_off(window), none_if_off(softcap), sinks is x.sinks),
        *(dropout, is_causal is not False),
    )
    supported = (
        *(x.num_q_heads, x.num_kv_heads, x.head_dim, x.v_head_dim),
        *(x.scale, x.sliding_window, x.logit_cap, True, 0.0, x.is_causal),
    )
    if call != supported:
        raise UnsupportedError(
            f"layer {x.layer_id} was called with (heads, KV heads, D, Dv, scale, window, softcap, "
            f"known sinks, dropout, causal) = {call}, attn-core was enabled for {supported}"
        )


def _mask(
    *args: Any, config: Any = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """Build no mask: causality, window and padding are the batch's; refuse any other pattern.

    Some models ask for a mask by this name and then attend by themselves: without a mask, to all
    tokens. So architectures that are not supported get none.

    Models of sparse MLA ask for one in every pass and index it for their indexer: it is empty.
    """
    check_decoder(config)
    if getattr(config, "index_topk", None) is not None:
        return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=kwargs.get("device"))
    if not allow_is_causal_skip:  # how transformers marks a mask that is more than causal
        raise UnsupportedError(
            "the model asks for a mask that is more than causal (packed sequences, bidirectional "
            "blocks); attn-core takes one request a row and a 2-D attention_mask"
        )
    return None


def padding_mask(arguments: dict[str, Any], columns: int) -> Tensor | None:
    """Return the 2-D padding mask, None where all tokens are real; refuse other patterns."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    packed = [name for name in _PACKED if arguments.get(name) is not None]
    if packed:
        raise UnsupportedError(
            f"{', '.join(packed)}: several sequences packed in a row; give each its own row"
        )
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"an attention_mask of {shape} (supports [batch, tokens], 1 = real, 0 = padding)"
            )
        return mask
    if positions is not None and positions.dim() == 3:  # time, height and width of image tokens;
        positions = positions[0] if positions.shape[0] == 4 else None  # four: the text's are first
    if positions is not None and not columns and bool((positions.diff() != 1).any()):
        raise UnsupportedError(
            "position_ids that restart, several sequences packed in a row; give each its own row"
        )
    return None
