"""Switch a transformers model to paged pools and the dispatcher, and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attn_core.cache.allocator import PageAllocator
from attn_core.errors import UnsupportedError, UsageError
from attn_core.integrations.choice import picking
from attn_core.integrations.transformers import linear, mla, sparse, vision
from attn_core.integrations.transformers.architectures import ModelAttention, read_attention
from attn_core.integrations.transformers.attention import (
    ENABLED,
    NAME,
    adopt,
    padding_mask,
    register,
)
from attn_core.integrations.transformers.common_prompts import marks_of
from attn_core.integrations.transformers.compiled import between, eager
from attn_core.integrations.transformers.forwards import cache_argument, take_cache
from attn_core.integrations.transformers.inference import refuse_arguments, without
from attn_core.integrations.transformers.linear_modules import refuse_changes
from attn_core.integrations.transformers.paged_cache import PagedCache
from attn_core.integrations.transformers.select import DTYPES, select_for
from attn_core.integrations.transformers.sequences import Sequences
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.no_backward import no_backward
from attn_core.selection.result import Overrides, Selection


def enable(
    model: Any,
    selection: Selection | None = None,
    *,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    shared_prefix: bool = False,
    num_pages: int | Mapping[str, int] | None = None,
    adaptive: bool | None = None,
    overrides: Overrides | None = None,
    registry: Registry | None = None,
) -> Engine:
    """Switch a transformers model to paged pools and the dispatcher, in place.

    model.generate(...), with padding on the left, and model(...) then use the selected backends.
    selection: None selects for the model's config, dtype and device, with the other arguments.
    num_pages: pages of each view ("full", "window") or of all alike, including the dummy page 0;
    None grows on demand.
    shared_prefix: rows of a new cache that begin with the same tokens share the pages of these, as
    parallel samples, beams and prompts with a common beginning do, and decode reads the pages once.
    Leave it out where equal tokens have other keys, as with an adapter for each row.
    adaptive: as in select_for; dispatcher.passes says which backend ran which pass.
    After each pass, layers with a window free the pages before it. Linear layers have a slot with a
    state per request; slots grow on demand. A vision tower runs through the selected encoder
    backend. A backward pass raises. Threads may share the model, each with its own cache; their
    passes take turns. torch.compile compiles the whole decoder, with each attention as one
    operator.

    Returns the handle, also a context manager: disable() restores the model. Raises
    UnsupportedError for an unsupported model, UsageError, and what select() raises.
    """
    if ENABLED in vars(model.get_decoder()):
        raise _enabled()
    attention = read_attention(model)
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedError(f"a model on {len(devices)} devices (supports one): {devices}")
    registry = registry or load_plugins()
    if selection is None:
        selection = select_for(
            model.config.to_dict(),
            dtype=model.dtype,
            device=model.device,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            shared_prefix=shared_prefix,
            overrides=overrides,
            adaptive=adaptive,
            registry=registry,
        )
    elif (
        page_size is not None or kv_cache_dtype != "auto" or shared_prefix or overrides is not None
    ):
        raise UsageError(
            "page_size, kv_cache_dtype, shared_prefix and overrides belong to the selection; give "
            "those or one"
        )
    else:
        selection = picking(selection, adaptive)
    dtype = DTYPES.get(model.dtype, str(model.dtype))  # the cache refuses what was not selected
    memory = PagedCache(
        attention, selection, registry, dtype=dtype, device=model.device, num_pages=num_pages
    )
    return Engine(model, attention, memory)


def _enabled() -> UsageError:
    return UsageError("attn-core is enabled on this model; call disable() of its handle first")


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the decoder. kept: its cache is handed back. is_new: it was made for the call."""

    cache: Any
    requests: Sequences
    tokens: Tensor
    kept: bool
    is_new: bool


class Engine:
    """A model on paged pools: the handle that `enable` returns."""

    def __init__(self, model: Any, attention: ModelAttention, memory: PagedCache) -> None:
        self._model, self._decoder = model, model.get_decoder()
        if vars(self._decoder).setdefault(ENABLED, self) is not self:  # of two threads, one
            raise _enabled()
        self._attention, self._memory = attention, memory
        self._forward = self._decoder.forward
        self._replaced = vars(self._decoder).get("forward")  # set where another tool wrapped it
        self._names = list(inspect.signature(self._forward).parameters)
        self._cache = cache_argument(self._names)
        config = model.config
        parts = {name: getattr(config, name) for name in config.sub_configs}
        self._before = {"": config._attn_implementation} | {
            name: part._attn_implementation for name, part in parts.items() if part is not None
        }
        self.enabled = True
        register()
        vision.attach(attention, memory.dispatcher, memory.lock)
        model.set_attn_implementation(
            {n: vision.NAME if n == "vision_config" else NAME for n in self._before}
        )
        if attention.latent:
            mla.keep_latent(attention.modules)
        linear.attach(attention.linear_modules)
        sparse.attach(attention.indexers.values())
        if memory.states is not None and memory.states.can_verify:
            vars(model)["_is_stateful"] = False  # assisted generation is refused where it is set

        @functools.wraps(self._forward)  # its signature is read by others
        @between
        def forward(*args: Any, **kwargs: Any) -> Any:
            with memory.lock:  # a pass at a time: the pool and the workspaces are shared
                if self.enabled:
                    return self._run(*args, **kwargs)
            return self._forward(*args, **kwargs)  # another thread has called disable()

        self._decoder.forward = forward

    def __reduce_ex__(self, protocol: object) -> str:
        raise UnsupportedError(
            "a model under attn-core cannot be copied or pickled: its copy would run the layers of "
            "the original; call disable() first, save_pretrained() works as it is"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    @property
    def selection(self) -> Selection:
        return self._memory.selection

    @property
    def dispatcher(self) -> HybridDispatcher:
        return self._memory.dispatcher

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The layers whose keys and values are in the pool; layer_id is the cache layer."""
        return self._memory.layers

    @property
    def page_size(self) -> int:
        return self._memory.page_size

    @property
    def pages(self) -> Mapping[str, PageAllocator]:
        """The owner of each page of each view that the model has, "full" and "window"."""
        self._memory.collect()
        return self._memory.pages

    @property
    def num_held(self) -> int:
        """Pages that requests hold, over all views."""
        return self._memory.num_held

    @property
    def kv_bytes(self) -> int:
        """Size of the pool of keys and values in bytes now."""
        return self._memory.pool.nbytes

    @property
    def state_bytes(self) -> int:
        """Size of the states of linear layers in bytes now, 0 without such layers."""
        return 0 if self._memory.states is None else self._memory.states.nbytes

    @property
    def num_states(self) -> int:
        """Slots of states that requests hold."""
        with self._memory.lock:
            return 0 if self._memory.states is None else self._memory.states.num_held

    def disable(self) -> None:
        """Restore the model; caches made in the meantime become unusable."""
        with self._memory.lock:
            if not self.enabled:
                return
            self.enabled = False
            self._model.set_attn_implementation(self._before)
            vision.detach(self._attention)
            mla.expand_again(self._attention.modules)
            linear.detach(self._attention.linear_modules)
            sparse.detach(self._attention.indexers.values())
            vars(self._model).pop("_is_stateful", None)
            del self._decoder.forward, vars(self._decoder)[ENABLED]
            if self._replaced is not None:
                self._decoder.forward = self._replaced

    @between
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's forward as one planned pass over the requests of its cache."""
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        call = self._begin(arguments, take_cache(arguments))
        if call is None:
            return self._forward(**arguments)  # the model says what is missing
        try:
            with torch.no_grad():
                output = self._forward(**arguments, **{self._cache: call.cache})
            return self._end(call, output)
        except BaseException:
            self._abandon(call)
            raise

    def _check_model(self) -> None:
        """Raise UnsupportedError for a model that was changed since it was enabled."""
        self._memory.check_model(self._decoder)
        if (name := self._decoder.config._attn_implementation) != NAME:
            raise UnsupportedError(
                f"attn_implementation is {name!r} by now, which does not read the pages of "
                f"attn-core's caches; call disable() of its handle, or set {NAME!r} again"
            )

    @eager
    def _begin(self, arguments: dict[str, Any], past: Any) -> _Call | None:
        """Plan a call of the decoder over `past`, or a new cache; None without tokens."""
        refuse_arguments(self._decoder, arguments)
        self._check_model()
        ids = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            return None
        refuse_changes(self._attention.linear_layers, self._attention.linear_modules)
        if self._attention.latent:
            mla.check_projections(self._attention.modules)
        config, use_cache = self._decoder.config, arguments.get("use_cache")
        has_cache = past is not None or (config.use_cache if use_cache is None else use_cache)
        cache = DynamicCache(config=config) if past is None else past
        requests = adopt(cache, self._memory, config)
        marks = None
        if self._memory.shares_prompts and ids is not None and not requests.columns:
            marks = marks_of(ids, arguments.get("position_ids"))
        mask = padding_mask(arguments, requests.columns)
        requests.begin(tokens.shape[0], tokens.shape[1], mask, marks)
        if self._attention.rotary is not None and requests.current.batch is not None:
            shape, own = (tokens.shape[0], tokens.shape[1]), arguments.get("position_ids")
            arguments["position_ids"] = requests.current.chunk_positions(shape, own)
        return _Call(cache, requests, tokens, has_cache, past is None)

    @eager
    def _end(self, call: _Call, output: Any) -> Any:
        """Count the tokens of the pass and return what the caller gets."""
        call.requests.commit()
        if not call.kept:
            call.requests.release()
            output = without(output, call.cache)
        weight = next((p for p in self._decoder.parameters() if p.requires_grad), call.tokens)
        return no_backward(output, call.tokens, weight)

    @eager
    def _abandon(self, call: _Call) -> None:
        """Forget a pass that failed, and the cache that was made for it."""
        call.requests.abandon()
        if call.is_new:
            call.requests.release()
