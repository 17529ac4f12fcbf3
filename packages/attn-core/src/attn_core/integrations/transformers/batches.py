"""Run a transformers model's own generate_batch() on its paged cache and selected backends."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching import continuous_api

from attn_core.errors import UnsupportedError, UsageError
from attn_core.integrations.transformers.architectures import read_attention
from attn_core.integrations.transformers.attention import ENABLED, NAME, attention, check_call
from attn_core.integrations.transformers.batch_passes import Batches
from attn_core.integrations.transformers.select import select_for
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import Overrides, Selection

PAGED = f"paged|{NAME}"  # what transformers 5.17 calls NAME in continuous batching
BATCHES = (
    f"{NAME}_batches"  # what a manager makes of both names: transformers builds no masks for it
)
_NAMES = (NAME, PAGED, BATCHES)
_STATE = "_attn_core_batches"  # on a cache
_CHOICE = "_attn_core_choice"  # on a model


@dataclass(frozen=True)
class _Choice:
    """How the backends of a model's batches are selected."""

    overrides: Overrides | None = None
    registry: Registry | None = None


def enable_batches(
    model: Any, *, overrides: Overrides | None = None, registry: Registry | None = None
) -> None:
    """Let generate_batch() of a model run through attn-core, on chosen backends.

    from_pretrained(..., attn_implementation="paged|attn_core") does the same without overrides.
    Raises UnsupportedError for a model that cannot be served, UsageError for one under enable().
    """
    _read(model)
    vars(model)[_CHOICE] = _Choice(overrides, registry)
    model.set_attn_implementation(BATCHES)


def register_batches() -> None:
    """Register the attention implementation and the manager that selects; again is harmless."""
    AttentionInterface.register(PAGED, attention)  # outside of a batch it says what is missing
    AttentionInterface.register(BATCHES, _attention)
    continuous_api.ContinuousBatchingManager = BatchManager


class BatchManager(continuous_api.ContinuousBatchingManager):  # type: ignore[misc]  # no types
    """transformers' manager, which also selects backends for models on attn-core.

    selection: the choice; None for a model on another attention implementation. Raises
    UnsupportedError where model or options cannot be served, and what select() raises, before any
    request is taken.
    """

    selection: Selection | None = None

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        if model.config._attn_implementation in _NAMES:
            self._layers = _read(model)
            sizes = [_block_size(continuous_batching_config)]
            self._page_size = math.gcd(*sizes, *(x.sliding_window or 0 for x in self._layers))
            choice: _Choice = vars(model).get(_CHOICE, _Choice())
            self._registry = choice.registry or load_plugins()
            self.selection = select_for(
                model.config.to_dict(),
                dtype=model.dtype,
                device=model.device,
                page_size=self._page_size,
                overrides=choice.overrides,
                registry=self._registry,
            )
        super().__init__(
            model=model,
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            workload_hints=workload_hints,
        )
        if self.selection is not None:
            _refuse_options(self.continuous_batching_config)

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any) -> None:
        """Let a model on attn-core stay there, after the manager's end too.

        A manager that is kept is given out again by this alone. Raises UsageError under enable(),
        and where the manager was made for another implementation.
        """
        _refuse_enabled(model)
        name = model.config._attn_implementation
        if (name in _NAMES) != (self.selection is not None):
            raise UsageError(
                f"attn_implementation is {name!r} by now, the manager that was kept is for "
                f"{'another' if self.selection is None else repr(PAGED)}; call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        if self.selection is None:
            super().switch_to_cb_friendly_attn(model, *args)
        else:
            model.set_attn_implementation(BATCHES)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if self.selection is not None and _STATE not in vars(processor.cache):
            cache = processor.cache
            vars(cache)["update"] = functools.partial(_hand_on, cache)  # called since 5.24
            vars(processor.cache)[_STATE] = Batches(
                self.selection, self._registry, self._layers, processor.cache, self._page_size
            )
        return processor


def _refuse_enabled(model: Any) -> None:
    if ENABLED in vars(model.get_decoder()):
        raise UsageError("generate_batch() of a model under enable(); call disable() first")


def _read(model: Any) -> tuple[AttentionLayer, ...]:
    """Return the layers of a model. Raises UnsupportedError, UsageError."""
    _refuse_enabled(model)
    attention = read_attention(model)
    result = {
        "latents (MLA)": attention.latent,
        "linear layers": attention.linear_layers,
        "a vision tower": attention.vision_layers,
        "dual chunk attention": attention.rotary is not None and attention.rotary.dual_chunk,
    }
    kinds = [kind for kind, present in result.items() if present]
    if kinds:
        raise UnsupportedError(
            f"generate_batch() of {type(model).__name__}, which has {' and '.join(kinds)}; it runs "
            "decoders that cache keys and values alone: use enable() and generate()"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or getattr(model, "_device_mesh", None) is not None:
        raise UnsupportedError(
            f"generate_batch() of a model on several devices ({sorted(map(str, devices))}); "
            "attn-core runs it on one"
        )
    return attention.layers


def _block_size(config: Any) -> int:
    """Return the tokens of a block, which transformers calls page_size in 5.23."""
    size: int = config.page_size if hasattr(config, "page_size") else config.block_size
    if size < 1:
        raise UsageError(f"blocks of {size} tokens (expected 1 or more)")
    return size


def _refuse_options(config: Any) -> None:
    """Raise UnsupportedError for options of continuous batching that need static shapes."""
    requested = [
        name
        for name, value in (
            ("use_async_batching", config.use_async_batching),
            ("use_cuda_graph", any(config.cuda_graph_booleans)),
            ("varlen_compile_config", config.varlen_compile_config),
            ("decode_compile_config", config.decode_compile_config),
        )
        if value
    ]
    if requested:
        raise UnsupportedError(
            f"generate_batch() with {', '.join(requested)}; attn-core plans each pass on the host, "
            "by the lengths of its requests: leave these options out"
        )


def _hand_on(
    cache: Any, keys: Tensor, values: Tensor, layer_id: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Leave the writing to the attention, and name the cache to it as before transformers 5.24."""
    kwargs["cache"] = cache
    return keys, values


def _attention(
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
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over a PagedAttentionCache: [1, H, T, D] each → [1, T, Hq, D].

    Raises UnsupportedError for anything asked of this layer that its AttentionLayer does not say.
    """
    batches: Batches | None = None if cache is None else vars(cache).get(_STATE)
    if batches is None:
        raise UnsupportedError(
            f"{type(module).__name__} attends without the cache of generate_batch(); for its other "
            "passes call enable(model), or model.set_attn_implementation('sdpa')"
        )
    layer_id: int = module.layer_idx  # type: ignore[assignment]  # an int of every decoder layer
    check_call(
        batches.pool.layers[layer_id].layer,
        (query.shape[1], key.shape[1], query.shape[3], value.shape[3]),
        (scaling, sliding_window, softcap, s_aux, dropout, is_causal),
    )
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            f"a custom mask in layer {layer_id} of generate_batch(); attn-core attends causally"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return batches.attend(q, k, v, layer_id, kwargs)[None], None
