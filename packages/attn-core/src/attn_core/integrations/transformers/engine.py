"""Switch a transformers model to paged pools and the dispatcher, and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attn_core.allocator import PageAllocator
from attn_core.capabilities import PLAIN_DTYPES, Device
from attn_core.decision import Overrides, Selection
from attn_core.device import probe_device
from attn_core.dispatcher import HybridDispatcher
from attn_core.errors import OutOfPagesError, UnsupportedError, UsageError
from attn_core.forward import AttentionLayer
from attn_core.integrations.transformers.architectures import attention_layers, check_supported
from attn_core.integrations.transformers.attention import NAME, PagedLayer, register
from attn_core.integrations.transformers.requests import Requests
from attn_core.kv_cache import STORES, KVPool
from attn_core.models import requirements_from_config
from attn_core.page_table import num_pages_for
from attn_core.plugins import Registry, load_plugins
from attn_core.selection import select

_DTYPES = {STORES[name]: name for name in PLAIN_DTYPES}
_SLACK = 256  # tokens: what a pool that grows on demand adds beyond the need


def select_for(
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    overrides: Overrides | None = None,
    registry: Registry | None = None,
) -> Selection:
    """Select the backends for the keys of a model's config.json on this machine.

    dtype, device: of the model's weights. Raises UnsupportedError for an architecture or
    device that is not supported, and what select() raises.
    """
    check_supported(config)
    if dtype not in _DTYPES:
        possible = ", ".join(sorted(str(d) for d in _DTYPES))
        raise UnsupportedError(f"a model in {dtype} (supports {possible}); use model.to(dtype)")
    needs = requirements_from_config(
        config,
        dtype=_DTYPES[dtype],
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
    )
    registry = registry or load_plugins()
    here = _device(device)
    return select(needs, here, registry, registry.installed_libraries(), overrides)


def _device(device: torch.device) -> Device:
    here = probe_device()
    if device.type == ("cuda" if here.type == "rocm" else here.type):
        return here
    if device.type == "cpu":
        return Device("cpu")  # this machine has an accelerator, the model does not use it
    raise UnsupportedError(f"the model is on {device}, this machine has {here}; use model.to(...)")


def enable(
    model: Any,
    selection: Selection | None = None,
    *,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    num_pages: int | None = None,
    overrides: Overrides | None = None,
    registry: Registry | None = None,
) -> Engine:
    """Put a transformers model on paged pools and the dispatcher, in place.

    From then on model.generate(...) and model(...) run through the selected backends, in batches
    with padding on either side too. selection: None selects for the model's config, dtype and
    device with page_size, kv_cache_dtype and overrides. num_pages: pages of the pool, the dummy
    page 0 included; None grows on demand. Inference only.

    Returns the handle, also a context manager: disable() gives the model back as it was. Raises
    UnsupportedError for a model that cannot run so, UsageError, and what select() raises.
    """
    if model.config._attn_implementation == NAME:
        raise UsageError("attn-core is enabled on this model; call disable() of its handle first")
    layers = attention_layers(model)
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
            overrides=overrides,
            registry=registry,
        )
    elif page_size is not None or kv_cache_dtype != "auto" or overrides is not None:
        raise UsageError(
            "page_size, kv_cache_dtype and overrides belong to the selection; give those or one"
        )
    return Engine(model, layers, selection, registry, num_pages)


class Engine:
    """A model on paged pools: the handle that `enable` returns."""

    def __init__(
        self,
        model: Any,
        layers: tuple[AttentionLayer, ...],
        selection: Selection,
        registry: Registry,
        num_pages: int | None,
    ) -> None:
        page_size = selection.page_size
        if page_size is None:
            raise UsageError("the selection has no page size: it chose no backend")
        self.selection, self.layers, self.device = selection, layers, model.device
        self.pages = PageAllocator(num_pages or 1, page_size)
        self._grows = num_pages is None
        self.dispatcher = HybridDispatcher.from_selection(
            selection, registry, layers, self._pool(num_pages or 1), dtype=_DTYPES[model.dtype]
        )
        self._model, self._decoder = model, model.get_decoder()
        self._before = model.config._attn_implementation
        self._forward = self._decoder.forward
        self._replaced = vars(self._decoder).get("forward")  # set where another tool wrapped it
        self._names = list(inspect.signature(self._forward).parameters)
        self.enabled = True
        register()
        model.set_attn_implementation(NAME)

        @functools.wraps(self._forward)  # its signature is read by others
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._decoder.forward = forward

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    @property
    def page_size(self) -> int:
        return self.pages.page_size

    @property
    def kv_bytes(self) -> int:
        """Bytes that the pool holds now."""
        return self.dispatcher.caches.nbytes

    def disable(self) -> None:
        """Give the model back as it was; caches made meanwhile cannot be used any more."""
        if not self.enabled:
            return
        self.enabled = False
        self._model.set_attn_implementation(self._before)
        del self._decoder.forward
        if self._replaced is not None:
            self._decoder.forward = self._replaced

    def reserve(self, pages: int) -> None:
        """Make sure that `pages` pages are free, or raise OutOfPagesError and change nothing."""
        lacking = pages - self.pages.num_free
        if lacking <= 0:
            return
        if not self._grows:
            raise OutOfPagesError(
                f"{pages} more pages of {self.page_size} tokens are asked, {self.pages.num_free} "
                f"of {self.pages.total} are free; drop a cache, ask for fewer tokens or give more "
                "with num_pages"
            )
        total = self.pages.total
        num_pages = 1 + total + max(lacking, total) + num_pages_for(_SLACK, self.page_size)
        pool, old = self._pool(num_pages), self.dispatcher.caches
        for layer in self.layers:
            parts = zip(
                pool.layer(layer.layer_id).parts(), old.layer(layer.layer_id).parts(), strict=True
            )
            for (to, _), (part, _) in parts:
                to[: total + 1] = part
        self.dispatcher.caches = pool
        self.pages.extend(num_pages)

    def _pool(self, num_pages: int) -> KVPool:
        layout = self.selection.layout
        assert layout in ("NHD", "HND")
        return KVPool(
            self.layers,
            num_pages=num_pages,
            page_size=self.page_size,
            kv_cache_dtype=self.selection.kv_cache_dtype,
            device=self.device,
            layout="HND" if layout == "HND" else "NHD",
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's forward as one planned pass over the requests of its cache."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._refuse(given)
        ids = given.get("input_ids")
        tokens = given.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            return self._forward(**given)  # the model says what is missing
        config, cache = self._decoder.config, given.get("past_key_values")
        use_cache = given.get("use_cache")
        kept = cache is not None or (config.use_cache if use_cache is None else use_cache)
        cache = DynamicCache(config=config) if cache is None else cache
        requests = self._adopt(cache)
        requests.begin(tokens.shape[0], tokens.shape[1], _padding_mask(given, requests.columns))
        try:
            with torch.no_grad():
                output = self._forward(**{**given, "past_key_values": cache})
            requests.commit()
        except BaseException:
            requests.abandon()
            kept = kept and given.get("past_key_values") is not None
            raise
        finally:
            if not kept:
                requests.release()
        return output if kept else _without(output, cache)

    def _refuse(self, given: dict[str, Any]) -> None:
        config = self._decoder.config
        if self._decoder.training:
            raise UnsupportedError("a model in training mode; attn-core is for inference: eval()")
        asked = given.get("output_attentions")
        if config.output_attentions if asked is None else asked:
            raise UnsupportedError(
                "output_attentions: paged backends do not keep attention weights; "
                "disable() attn-core for this call"
            )

    def _adopt(self, cache: Any) -> Requests:
        """Return the requests of a cache, after giving an empty one paged layers."""
        layers = getattr(cache, "layers", ())
        if layers and isinstance(layers[0], PagedLayer):
            requests = layers[0].requests
            if not requests.belong_to(self):
                raise UnsupportedError(
                    "this cache lies in the pool of another model; start a new cache"
                )
            return requests
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
        requests = Requests(self)
        cache.layers = [PagedLayer(requests, layer) for layer in self.layers]
        cache.layer_class_to_replicate = None
        return requests


def _padding_mask(given: dict[str, Any], columns: int) -> Tensor | None:
    """Return the 2-D padding mask, None where all tokens are real; refuse other patterns."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"an attention_mask of {shape} (supports [batch, tokens], 1 = real, 0 = padding)"
            )
        return mask
    if positions is not None and not columns and bool((positions.diff() != 1).any()):
        raise UnsupportedError(
            "position_ids that restart, several sequences packed in a row; give each its own row"
        )
    return None


def _without(output: Any, cache: Any) -> Any:
    """Return a model's output without a cache that nobody asked for."""
    if isinstance(output, tuple):
        return tuple(x for x in output if x is not cache)
    return type(output)(**{name: x for name, x in output.items() if x is not cache})
