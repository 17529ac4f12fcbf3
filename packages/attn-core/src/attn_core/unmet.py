"""The gap between a row and what is asked: each unmet need and the changes that close it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import Version

from attn_core.capabilities import (
    PLAIN_DTYPES,
    TREES,
    Capabilities,
    Device,
    LayerNeeds,
    Phase,
    Requirements,
    Speculation,
    VerifyMode,
)
from attn_core.libraries import Libraries, alternatives, shortfall
from attn_core.listing import listing, places
from attn_core.page_size import takes_page

# "softmax" and "linear" are the layers of the model of that family, "vision" its tower
Target = Literal["requirements", "softmax", "linear", "vision", "device", "libraries", "overrides"]

# What a change costs the caller: a flag, an installation, another machine, another model, and
# last a model of another kind. Naming a backend for one phase only costs 1.
FLAG, FEATURE, INSTALL, RUNTIME, DTYPE, MACHINE, MODEL, KIND = 2, 4, 6, 8, 20, 60, 200, 400


@dataclass(frozen=True)
class Change:
    """One thing a caller can change: `values` are set on `target`; `text` says it in words."""

    target: Target
    values: tuple[tuple[str, Any], ...]
    cost: int
    text: str


@dataclass(frozen=True)
class Unmet:
    """One need that a row does not meet; any one of `changes` closes it."""

    need: str
    asked: str
    supported: str
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        return f"{self.asked} ({self.supported})"


def unmet(
    row: Capabilities,
    needs: Requirements,
    device: Device,
    libraries: Libraries,
    phase: Phase,
    *,
    speculates: bool = False,
) -> tuple[Unmet, ...]:
    """List what `row` lacks for `phase`; an empty tuple means that it fits.

    speculates: the backend of this phase also verifies and drafts.
    """
    found = [*_where(row, device), *_libraries(row, libraries)]
    if phase not in row.phases:
        phases = listing(p.value for p in row.phases)
        found.append(Unmet("phase", f"phase {phase.value}", f"supports {phases}"))
    if needs.dtype not in row.dtypes:
        options = [
            _set(f"--dtype {d}", DTYPE, dtype=d, kv_cache_dtype="auto") for d in sorted(row.dtypes)
        ]
        found.append(_no("dtype", needs.dtype, listing(row.dtypes), options))
    target: Target = "vision" if phase is Phase.ENCODE else row.family
    for layer in _layers(row, needs, phase):
        found.extend(x for x in layer_gaps(row, layer, target) if x not in found)
    if row.family == "linear" and not needs.linear_layers:
        found.append(Unmet("linear", "linear attention", "the model has no linear layers"))
    if row.family == "softmax" and phase is not Phase.ENCODE:
        found.extend(_store(row, needs))
        found.extend(_flags(row, needs, phase, speculates))
    found.extend(_speculation(row, needs, speculates))
    return tuple(found)


def _set(text: str, cost: int, **values: Any) -> Change:
    return Change("requirements", tuple(values.items()), cost, text)


def _no(need: str, asked: object, supported: str, changes: Iterable[Change] = ()) -> Unmet:
    possible = f"supports {supported}" if supported else "not supported"
    return Unmet(need, f"{need} {asked}", possible, tuple(changes))


def _where(row: Capabilities, device: Device) -> Iterator[Unmet]:
    here = row.device in ("any", device.type)
    if not here or (row.archs and device.arch not in row.archs):
        kind = device.type if row.device == "any" else row.device
        named = sorted(row.archs, key=lambda a: (len(a), a))
        moves = [
            Change(
                "device",
                (("type", kind), ("arch", arch)) + (() if here else (("runtime", None),)),
                MACHINE + (0 if here else 1),
                f"--device {Device(kind, arch)}",
            )
            for arch in named or (None,)
        ]
        yield _no("device", device, places([row]), moves)
    elif row.min_runtime and device.runtime and Version(device.runtime) < Version(row.min_runtime):
        newer = Change(
            "device",
            (("runtime", row.min_runtime),),
            RUNTIME,
            f"a runtime of {row.min_runtime} or newer (--runtime-version {row.min_runtime})",
        )
        yield _no("runtime", device.runtime, f">= {row.min_runtime}", [newer])


def _libraries(row: Capabilities, libraries: Libraries) -> Iterator[Unmet]:
    for group in row.requires:
        there = shortfall(group, libraries)
        if there is not None:
            installs = [
                Change("libraries", ((canonicalize_name(w.name), None),), INSTALL, f"install {w}")
                for w in alternatives(group)
            ]
            yield Unmet("library", there, f"needs {group}", tuple(installs))


def _layers(row: Capabilities, needs: Requirements, phase: Phase) -> tuple[LayerNeeds, ...]:
    if row.family == "linear":
        return needs.linear_layers
    if phase is Phase.ENCODE:
        return (needs.vision,) if needs.vision is not None else ()
    # an encoder runs once, before decoding
    return tuple(x for x in needs.softmax_layers if phase is Phase.PREFILL or not x.encoder)


def _model(target: Target, text: str, **values: Any) -> Change:
    cost = KIND if "kind" in values else MODEL
    return Change(target, tuple(values.items()), cost, f"a model {text}")


def layer_gaps(row: Capabilities, layer: LayerNeeds, target: Target) -> Iterator[Unmet]:
    """List what `row` lacks for one layer; the changes are made to the layers of `target`."""
    if layer.kind != row.kind:
        other = _model(
            target,
            f"with {row.kind} layers",
            kind=row.kind,
            head_dim=None,
            v_head_dim=None,
            num_q_heads=None,
            num_kv_heads=None,
        )
        yield _no("kind", layer.kind, row.kind, [other])
        return
    if row.family == "softmax":
        yield from _head_dims(row, layer, target)
    elif layer.head_dim is not None and row.head_dims and layer.head_dim not in row.head_dims:
        options = [_model(target, f"with head_dim {d}", head_dim=d) for d in sorted(row.head_dims)]
        yield _no("head_dim", layer.head_dim, listing(row.head_dims), options)
    hq, hkv = layer.num_q_heads, layer.num_kv_heads
    if hq is not None and row.q_heads and hq not in row.q_heads:
        options = [
            _model(target, f"with {h} query heads", num_q_heads=h, num_kv_heads=None)
            for h in sorted(row.q_heads)
        ]
        yield _no("num_q_heads", hq, listing(row.q_heads), options)
    if hq and hkv and row.group_sizes and hq // hkv not in row.group_sizes:
        options = [
            _model(target, f"with {g} query heads per KV head", num_q_heads=g, num_kv_heads=1)
            for g in sorted(row.group_sizes)
        ]
        yield _no("group_size", hq // hkv, listing(row.group_sizes), options)
    for name, able, without in (
        ("sliding_window", row.sliding_window, None),
        ("logit_cap", row.logit_cap, None),
        ("sinks", row.sinks, False),
        ("cross", row.cross_attention, False),
        ("encoder", row.encoder, False),
    ):
        value = getattr(layer, name)
        if value and not able:
            said = "" if value is True else f" {value:g}"
            change = _model(target, f"without {name}", **{name: without})
            yield Unmet(name, f"{name}{said}", "not supported", (change,))


def _head_dims(row: Capabilities, layer: LayerNeeds, target: Target) -> Iterator[Unmet]:
    d, dv = layer.head_dim, layer.v_head_dim
    if d is None:
        return
    dv = d if dv is None else dv
    pairs = row.head_dim_pairs
    if d == dv:
        fits = not row.head_dims or d in row.head_dims
    else:
        fits = pairs == "any" or (d, dv) in pairs
    if fits:
        return
    possible = listing(row.head_dims) or "equal dims"
    options = [
        _model(target, f"with head_dim {x}", head_dim=x, v_head_dim=x)
        for x in sorted(row.head_dims, key=lambda x: abs(x - d))
    ]
    if not row.head_dims:
        options = [_model(target, f"with v_head_dim {d}", head_dim=d, v_head_dim=d)]
    if pairs and pairs != "any":
        some = sorted(pairs)
        possible += ", " + (listing(some) if len(some) < 6 else f"{some[0]} … {some[-1]}")
        options += [
            _model(target, f"with head_dim {x}/{y}", head_dim=x, v_head_dim=y) for x, y in some[:6]
        ]
    yield _no("head_dim", d if d == dv else f"{d}/{dv}", possible, options)


def _store(row: Capabilities, needs: Requirements) -> Iterator[Unmet]:
    store = needs.store_dtype
    mixed = store in PLAIN_DTYPES and store != needs.dtype and not row.mixed_kv
    follows = needs.kv_cache_dtype == "auto" and needs.dtype not in row.dtypes  # said already
    if (store not in row.kv_dtypes or mixed) and not follows:
        options = sorted(d for d in row.kv_dtypes if d not in PLAIN_DTYPES or row.mixed_kv)
        if needs.dtype in row.kv_dtypes:
            options.append("auto")
        alike = {d: FLAG if d[:3] == store[:3] else FLAG + 1 for d in options}  # FP8 stays FP8
        changes = [
            _set(f"--kv-cache-dtype {d}", alike[d], kv_cache_dtype=d)
            for d in sorted(options, key=alike.__getitem__)
        ]
        asked = f"{store} of a {needs.dtype} model" if mixed else store
        possible = options if mixed else sorted(row.kv_dtypes)
        yield _no("kv_cache_dtype", asked, ", ".join(possible), changes)
    page = needs.page_size
    if page is not None and not takes_page(row, page):
        sizes = f"{listing(row.page_sizes)} and multiples" if row.page_sizes else ""
        if row.max_page_size is not None:
            sizes = f"{sizes}, " * bool(sizes) + f"at most {row.max_page_size}"
        sizes = sizes.replace(" and multiples", "") if len(row.page_sizes) > 1 else sizes
        # the selection puts the page that it would choose in the place of None
        yield _no("page_size", page, sizes, [_set("no --page-size", FLAG, page_size=None)])
    linear = bool(needs.linear_layers)
    if row.beside_linear is not None and row.beside_linear != linear:
        change = Change("linear", (("layers", ()),), MODEL, "a model without linear layers")
        yield Unmet(
            "beside_linear",
            "full attention beside linear layers" if linear else "full attention alone",
            "not supported",
            (change,) if linear else (),
        )


def _flags(
    row: Capabilities, needs: Requirements, phase: Phase, speculates: bool
) -> Iterator[Unmet]:
    if needs.lse and not row.lse:
        yield _no("lse", "asked", "", [_set("no log-sum-exp output", FEATURE, lse=False)])
    if needs.deterministic and not row.deterministic:
        change = _set("no determinism", FEATURE, deterministic=False)
        yield _no("deterministic", "asked", "", [change])
    # verify and draft extend are captured as a whole, prefill never
    short = row.cuda_graph != "full" if speculates else row.cuda_graph == "none"
    if needs.graphs and short and (speculates or phase is Phase.DECODE):
        asked, possible = ("full", row.cuda_graph) if speculates else ("asked", "")
        spec = needs.speculation if speculates else None
        options = [] if spec is None else _verified_elsewhere(spec)
        without = _set("no CUDA graphs", FEATURE, graphs=False)
        yield _no("cuda_graph", asked, possible, [without, *options])


def _verified_elsewhere(spec: Speculation) -> list[Change]:
    """List the changes after which the backend of this phase verifies no drafts."""
    mode: VerifyMode = "decode" if spec.mode == "prefill" else "prefill"
    text, other = f"--speculative-attention-mode {mode}", replace(spec, mode=mode)
    none = _set("no speculation", FEATURE + 1, speculation=None)
    return [none, _set(text, FLAG + 1, speculation=other)]


def _speculation(row: Capabilities, needs: Requirements, speculates: bool) -> Iterator[Unmet]:
    spec = needs.speculation
    if spec is None:
        return
    limit = TREES if row.run_topk is None or row.family == "linear" else row.run_topk
    if speculates:
        limit = min(limit, row.max_topk)
    if spec.topk <= limit:
        return
    options = _verified_elsewhere(spec)[: 2 if speculates and row.family == "softmax" else 1]
    if limit >= 1:
        text = f"--speculative-eagle-topk {limit}"
        options.insert(0, _set(text, FEATURE, speculation=replace(spec, topk=limit)))
    possible = f"topk up to {limit}" if limit else "no speculation"
    yield _no("speculative topk", spec.topk, possible, options)
