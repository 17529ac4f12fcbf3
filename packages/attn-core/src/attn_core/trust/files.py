"""Write and read reproducers: safetensors with JSON; a file is checked before anything runs it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache, Scale
from attn_core.errors import AttnError, UsageError
from attn_core.runtime.batch import ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.trust.fields import Fields
from attn_core.trust.header import KEY, metadata, none_of_ours
from attn_core.trust.reproducer import LIMITS, Reproducer, Setting

FORMAT = 1
_LAYER = (
    *("layer_id", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "scale", "view"),
    *("logit_cap", "sliding_window", "is_causal", "is_cross"),
)
_PLAIN = ("fp32", "fp16", "bf16")
_FLOATS = tuple(TORCH_DTYPES[name] for name in _PLAIN)
_MOST_LAYERS, _NAME = 64, 100


def save(r: Reproducer, path: Path) -> None:
    """Write a reproducer; nobody sees half a file. Raises UsageError without safetensors."""
    tensors: dict[str, Tensor | None] = {
        "q": r.q, "k": r.k, "v": r.v, "page_table": r.page_table,
        "cache.k": r.cache.k, "cache.v": r.cache.v, "sinks": r.layer.sinks,
        "tree_mask": None if r.spec is None else r.spec.tree_mask,
    }  # fmt: skip
    for name, blocks in zip(("k", "v"), r.cache.block_scales or (), strict=False):
        tensors[f"cache.{name}_blocks"] = blocks
    for i, (out, lse) in enumerate(r.recorded.values()):
        tensors[f"out.{i}"], tensors[f"lse.{i}"] = out, lse
    scales = [
        {"value": float(x), "tensor": isinstance(x, Tensor)}
        for x in (r.cache.k_scale, r.cache.v_scale)
    ]
    data = {
        "format": FORMAT,
        "about": dict(r.about),
        "setting": {**vars(r.setting), "limits": dict(r.setting.limits)},
        "layer": {name: getattr(r.layer, name) for name in _LAYER},
        "others": [{name: getattr(x, name) for name in _LAYER} for x in r.others],
        "mode": r.mode.value,
        "query_lens": r.query_lens,
        "seq_lens": r.seq_lens,
        "spec": None if r.spec is None else [r.spec.topk, r.spec.num_draft_tokens],
        "layout": r.cache.layout,
        "scales": scales,
        "lse": r.lse,
        "host_lengths": r.host_lengths,
        "recorded": list(r.recorded),
    }
    save_file = _library().torch.save_file
    saved = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(saved, part, metadata={KEY: json.dumps(data)})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise UsageError(
            "reproducers are files of safetensors, which is not installed: pip install safetensors"
        ) from None
    return safetensors


def load(path: Path) -> Reproducer:
    """Read a reproducer. Raises UsageError, with the reason, for a file that is none.

    All that a kernel trusts is checked: shapes, page ids, lengths.
    """
    data = metadata(path)
    library = _library()
    try:
        with library.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _reproducer(Fields(data, "the metadata"), tensors)
    except (
        AttnError,
        OSError,
        ValueError,
        OverflowError,
        RecursionError,
        library.SafetensorError,
    ) as error:
        raise none_of_ours(path, error) from error


def _reproducer(data: Fields, tensors: Mapping[str, Tensor]) -> Reproducer:
    if data.get("format", int) != FORMAT:
        raise UsageError(f"its format is {data.data['format']}, this attn-core reads {FORMAT}")
    setting = _setting(Fields(data.get("setting", dict), "setting"))
    layer = _layer(Fields(data.get("layer", dict), "layer"), tensors.get("sinks"))
    layers = data.get("others", list)
    if len(layers) > _MOST_LAYERS:
        raise UsageError(f"{len(layers)} other layers")
    other_layers = tuple(_layer(Fields(x, "others"), None) for x in layers)
    if any(x.view != layer.view for x in other_layers):
        raise UsageError("layers of several views")
    mode = ForwardMode(
        data.one_of("mode", tuple(m.value for m in ForwardMode if m.value != "idle"))
    )
    queries, keys = data.lengths("query_lens"), data.lengths("seq_lens")
    spec = None
    if data.data.get("spec") is not None:
        topk, drafts = data.pair("spec")
        spec = SpecInfo(topk=topk, num_draft_tokens=drafts, tree_mask=tensors.get("tree_mask"))
    t, names = sum(queries), data.get("recorded", list)
    recorded = {}
    for i, name in enumerate(names):
        if not isinstance(name, str) or not 0 < len(name) <= _NAME:
            raise UsageError("recorded: no name of a backend")
        out = _tensor(tensors, f"out.{i}", (t, layer.num_q_heads, layer.v_head_dim))
        lse = tensors.get(f"lse.{i}")
        if lse is not None:
            lse = _tensor(tensors, f"lse.{i}", (t, layer.num_q_heads), (torch.float32,))
        recorded[name] = (out, lse)
    cache = _cache(data, setting, layer, tensors)
    dtype = (TORCH_DTYPES[setting.dtype],)
    new: list[Tensor | None] = [None, None]
    for i, (name, dim) in enumerate((("k", layer.head_dim), ("v", layer.v_head_dim))):
        if name in tensors and not layer.is_cross:
            new[i] = _tensor(tensors, name, (t, layer.num_kv_heads, dim), dtype)
    if new[0] is None and new[1] is not None:
        raise UsageError("v without k")
    r = Reproducer(
        setting=setting,
        layer=layer,
        others=other_layers,
        cache=cache,
        mode=mode,
        query_lens=queries,
        seq_lens=keys,
        page_table=_table(tensors, len(keys), cache, keys),
        q=_tensor(tensors, "q", (t, layer.num_q_heads, layer.head_dim), dtype),
        k=new[0],
        v=new[1],
        spec=spec,
        lse=data.get("lse", bool),
        host_lengths=data.get("host_lengths", bool),
        recorded=recorded,
        about=data.get("about", dict),
    )
    r.batch(torch.device("cpu"))  # raises BatchError
    return r


def _setting(data: Fields) -> Setting:
    limits = Fields(data.get("limits", dict), "limits")
    return Setting(
        kind=data.one_of("kind", ("mha", "mla")),
        dtype=data.one_of("dtype", _PLAIN),
        kv_cache_dtype=data.one_of("kv_cache_dtype", tuple(TORCH_DTYPES)),
        deterministic=data.get("deterministic", bool),
        shared_prefix=data.get("shared_prefix", bool),
        limits={name: limits.number(name) for name in LIMITS},
    )


def _layer(data: Fields, sinks: Tensor | None) -> AttentionLayer:
    numbers: dict[str, Any] = {n: data.number(n, minimum=1) for n in _LAYER[1:5]}
    cap, window = data.data.get("logit_cap"), data.data.get("sliding_window")
    if len(data.get("view", str)) > _NAME:
        raise UsageError("layer: the name of its view is too long")
    return AttentionLayer(
        layer_id=data.number("layer_id"),
        **numbers,
        scale=float(data.get("scale", (int, float))),
        view=data.get("view", str),
        logit_cap=None if cap is None else float(data.get("logit_cap", (int, float))),
        sliding_window=None if window is None else data.number("sliding_window", minimum=1),
        is_causal=data.get("is_causal", bool),
        is_cross=data.get("is_cross", bool),
        sinks=sinks,
    )


def _tensor(
    tensors: Mapping[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
) -> Tensor:
    x = tensors.get(name)
    if x is None or tuple(x.shape) != shape or x.dtype not in dtypes:
        stored = "absent" if x is None else f"{x.dtype} {list(x.shape)}"
        raise UsageError(f"{name} is {stored} (expected {list(shape)} of {dtypes[0]})")
    return x


def _cache(
    data: Fields, setting: Setting, layer: AttentionLayer, tensors: Mapping[str, Tensor]
) -> LayerCache:
    layout, store = data.one_of("layout", ("NHD", "HND")), setting.kv_cache_dtype
    pool = tensors.get("cache.k")
    if pool is None or pool.dim() != 4 or 0 in pool.shape:
        raise UsageError("cache.k (expected pages)")
    heads = (
        (pool.shape[1], layer.num_kv_heads)
        if layout == "NHD"
        else (layer.num_kv_heads, pool.shape[2])
    )
    fp4, latent = store == "fp4_e2m1", setting.kind == "mla"
    if latent and layer.v_head_dim > layer.head_dim:
        raise UsageError("layer: v_head_dim is above head_dim, of latents")
    parts, blocks = [], []
    for name, dim in (("k", layer.head_dim), ("v", layer.v_head_dim)):
        if name == "v" and latent:
            continue
        if fp4 and dim % 16:
            raise UsageError(f"head dim {dim} in fp4_e2m1")
        shape = (pool.shape[0], *heads)
        parts.append(
            _tensor(
                tensors, f"cache.{name}", (*shape, dim // 2 if fp4 else dim), (TORCH_DTYPES[store],)
            )
        )
        if fp4:
            e4m3 = (torch.float8_e4m3fn,)
            blocks.append(_tensor(tensors, f"cache.{name}_blocks", (*shape, dim // 16), e4m3))
    scales = data.get("scales", list)
    if len(scales) != 2:
        raise UsageError("scales (expected two)")
    k_scale, v_scale = (_scale(Fields(x, "scales")) for x in scales)
    return LayerCache(
        k=parts[0],
        v=None if latent else parts[1],
        k_scale=k_scale,
        v_scale=v_scale,
        block_scales=(blocks[0], None if latent else blocks[1]) if fp4 else None,
        layout=layout,
    )


def _scale(data: Fields) -> Scale:
    value = float(data.get("value", (int, float)))
    if not 0 < value < math.inf:
        raise UsageError(f"scale {value}")
    if not data.get("tensor", bool):
        return value
    return torch.tensor([value], dtype=torch.float32, device="cpu")


def _table(
    tensors: Mapping[str, Tensor], requests: int, cache: LayerCache, seq_lens: tuple[int, ...]
) -> Tensor:
    table = tensors.get("page_table")
    if table is None or table.dim() != 2 or table.dtype != torch.int32 or len(table) != requests:
        raise UsageError("page_table (expected int32, a row per request)")
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < cache.num_pages:
        raise UsageError("page_table names pages that are not in the file")
    if max(seq_lens) > table.shape[1] * cache.page_size:
        raise UsageError(f"a request of {max(seq_lens)} tokens is longer than its pages")
    return table
