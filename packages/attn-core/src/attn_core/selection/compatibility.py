"""Compare a row with requirements: every mismatch, and the fixes that close it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from attn_core.formatting import listing
from attn_core.plugins.dependencies import Libraries, alternatives, shortfall
from attn_core.selection.dual_chunk_gaps import chunk_layer_gaps, chunk_page_gaps, most_drafts
from attn_core.selection.mismatch import Fix, FixCost, Mismatch, Target
from attn_core.selection.store_gaps import store_gaps
from attn_core.spec.capabilities import ANY_TOPK, Capabilities, places
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Phase, VerifyMode
from attn_core.spec.page_size import takes_page
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation


def mismatches(
    row: Capabilities,
    needs: Requirements,
    device: Device,
    libraries: Libraries,
    phase: Phase,
    *,
    speculates: bool = False,
) -> tuple[Mismatch, ...]:
    """Return what `row` lacks for `phase`; an empty tuple means that it fits.

    speculates: whether the backend of this phase also verifies and drafts.
    """
    gaps = [*_device_gaps(row, device), *_library_gaps(row, libraries)]
    if phase not in row.phases:
        phases = listing(p.value for p in row.phases)
        gaps.append(Mismatch("phase", f"phase {phase.value}", f"supports {phases}"))
    if needs.dtype not in row.dtypes:
        options = [_fix(f"--dtype {d}", FixCost.DTYPE, dtype=d) for d in sorted(row.dtypes)]
        gaps.append(_gap("dtype", needs.dtype, listing(row.dtypes), options))
    target: Target = "vision" if phase is Phase.ENCODE else row.family
    for layer in _layers(row, needs, phase):
        gaps.extend(x for x in layer_gaps(row, layer, target) if x not in gaps)
    if not any(x.family == row.family for x in needs.layers) and phase is not Phase.ENCODE:
        gaps.append(_family_gap(row.family, row))
    if phase is Phase.ENCODE and needs.vision is None:
        tower = LayerRequirements(encoder=True)
        fix = Fix("vision", (("tower", tower),), FixCost.KIND, "a model with a vision tower")
        gaps.append(Mismatch("vision", "a vision tower", "the model has none", (fix,)))
    if row.family == "softmax" and phase is not Phase.ENCODE:
        gaps.extend(_cache_gaps(row, needs))
        gaps.extend(_flag_gaps(row, needs, phase, speculates))
    gaps.extend(_speculation_gaps(row, needs, speculates))
    return tuple(gaps)


def _family_gap(family: Family, row: Capabilities) -> Mismatch:
    added = (("layers", (LayerRequirements(kind=row.kind),)),)
    fix = Fix(family, added, FixCost.KIND, f"a model with {row.kind} layers")
    return Mismatch(family, f"{family} attention", f"the model has no {family} layers", (fix,))


def _fix(text: str, cost: int, **values: Any) -> Fix:
    return Fix("requirements", tuple(values.items()), cost, text)


def _gap(need: str, requested: object, supported: str, fixes: Iterable[Fix] = ()) -> Mismatch:
    supports = f"supports {supported}" if supported else "not supported"
    return Mismatch(need, f"{need} {requested}", supports, tuple(fixes))


def _device_gaps(row: Capabilities, device: Device) -> Iterator[Mismatch]:
    type_fits = row.device in ("any", device.type)
    if not type_fits or (row.archs and device.arch not in row.archs):
        kind = device.type if row.device == "any" else row.device
        archs = sorted(row.archs, key=lambda a: (len(a), a))
        cost = FixCost.MACHINE if type_fits else FixCost.MACHINE + 1
        moves = [
            Fix("device", (("type", kind), ("arch", arch)), cost, f"--device {Device(kind, arch)}")
            for arch in archs or (None,)
        ]
        if not type_fits and device.runtime is not None:  # a version of another library
            moves += [
                Fix(
                    "device",
                    (*move.values, ("runtime", None)),
                    move.cost + 1,
                    f"{move.text} without --runtime-version",
                )
                for move in moves
            ]
        yield _gap("device", device, places([row]), moves)
    elif row.min_runtime and device.runtime and Version(device.runtime) < Version(row.min_runtime):
        newer = Fix(
            "device",
            (("runtime", row.min_runtime),),
            FixCost.RUNTIME,
            f"a runtime of {row.min_runtime} or newer (--runtime-version {row.min_runtime})",
        )
        yield _gap("runtime", device.runtime, f">= {row.min_runtime}", [newer])


def _library_gaps(row: Capabilities, libraries: Libraries) -> Iterator[Mismatch]:
    for group in row.requires:
        missing = shortfall(group, libraries)
        if missing is not None:
            installs = [
                Fix(
                    "libraries",
                    ((canonicalize_name(w.name), None),),
                    FixCost.INSTALL,
                    f"install {w}",
                )
                for w in alternatives(group)
            ]
            yield Mismatch("library", missing, f"needs {group}", tuple(installs))


def _layers(row: Capabilities, needs: Requirements, phase: Phase) -> tuple[LayerRequirements, ...]:
    if row.family == "linear":
        return needs.linear_layers
    if phase is Phase.ENCODE:
        return (needs.vision,) if needs.vision is not None else ()
    # an encoder runs once, before decoding
    return tuple(x for x in needs.softmax_layers if phase is Phase.PREFILL or not x.encoder)


def _model_fix(target: Target, text: str, **values: Any) -> Fix:
    cost = FixCost.KIND if "kind" in values else FixCost.MODEL
    return Fix(target, tuple(values.items()), cost, f"a model {text}")


def layer_gaps(row: Capabilities, layer: LayerRequirements, target: Target) -> Iterator[Mismatch]:
    """List what `row` lacks for one layer; the fixes are applied to the layers of `target`."""
    if layer.kind != row.kind:
        unknown = dict.fromkeys(("head_dim", "v_head_dim", "num_q_heads", "num_kv_heads"))
        kind_fix = _model_fix(target, f"with {row.kind} layers", kind=row.kind, **unknown)
        yield _gap("kind", layer.kind, row.kind, [kind_fix])
        return
    yield from _head_dim_gaps(row, layer, target)
    hq, hkv = layer.num_q_heads, layer.num_kv_heads
    if hq is not None and row.q_heads and hq not in row.q_heads:
        options = [
            _model_fix(target, f"with {h} query heads", num_q_heads=h, num_kv_heads=None)
            for h in sorted(row.q_heads)
        ]
        yield _gap("num_q_heads", hq, listing(row.q_heads), options)
    if hq and hkv and row.group_sizes and hq // hkv not in row.group_sizes:
        options = [
            _model_fix(target, f"with {g} query heads per KV head", num_q_heads=g, num_kv_heads=1)
            for g in sorted(row.group_sizes)
        ]
        yield _gap("group_size", hq // hkv, listing(row.group_sizes), options)
    window = layer.sliding_window
    if window and row.sliding_window and (layer.cross or layer.encoder):
        fix = _model_fix(target, "without sliding_window", sliding_window=None)
        requested = f"a sliding window of {window} without causal order"
        yield Mismatch("sliding_window", requested, "not supported", (fix,))
    for name, supported, without in (
        ("sliding_window", row.sliding_window, None),
        ("logit_cap", row.logit_cap, None),
        ("sinks", row.sinks, False),
        ("cross", row.cross_attention, False),
        ("encoder", row.encoder, False),
    ):
        value = getattr(layer, name)
        if value and not supported:
            text = "" if value is True else f" {value:g}"
            fix = _model_fix(target, f"without {name}", **{name: without})
            yield Mismatch(name, f"{name}{text}", "not supported", (fix,))
    yield from chunk_layer_gaps(row, layer, target)


def _head_dim_gaps(
    row: Capabilities, layer: LayerRequirements, target: Target
) -> Iterator[Mismatch]:
    d, dv = layer.head_dim, layer.v_head_dim
    if d is None:
        return
    dv = d if dv is None else dv
    pairs = row.head_dim_pairs
    if d == dv or pairs == "any":
        fits = not row.head_dims or {d, dv} <= row.head_dims
    else:
        fits = (d, dv) in pairs
    if fits:
        return
    supported = listing(row.head_dims) or "equal dims"
    options = [
        _model_fix(target, f"with head_dim {x}", head_dim=x, v_head_dim=x)
        for x in sorted(row.head_dims, key=lambda x: abs(x - d))
    ]
    if not row.head_dims:
        options = [_model_fix(target, f"with v_head_dim {d}", head_dim=d, v_head_dim=d)]
    if pairs and pairs != "any":
        listed = sorted(pairs)
        supported += ", " + (listing(listed) if len(listed) < 6 else f"{listed[0]} … {listed[-1]}")
        options += [
            _model_fix(target, f"with head_dim {x}/{y}", head_dim=x, v_head_dim=y)
            for x, y in listed[:6]
        ]
    yield _gap("head_dim", d if d == dv else f"{d}/{dv}", supported, options)


def _cache_gaps(row: Capabilities, needs: Requirements) -> Iterator[Mismatch]:
    yield from store_gaps(row, needs)
    page = needs.page_size
    if page is not None and not takes_page(row, page):
        sizes = f"{listing(row.page_sizes)} and multiples" if row.page_sizes else ""
        if row.max_page_size is not None:
            sizes = f"{sizes}, " * bool(sizes) + f"at most {row.max_page_size}"
        if len(row.page_sizes) > 1 or "NHD" not in row.layouts:
            sizes = sizes.replace(" and multiples", "")
        # the selection puts the page that it would choose in the place of None
        yield _gap("page_size", page, sizes, [_fix("no --page-size", FixCost.FLAG, page_size=None)])
    if row.requires_finite_padding and not needs.finite_padding:
        fix = _fix("a cache whose memory stays", FixCost.FEATURE, finite_padding=True)
        need = "unused pages that may hold NaN"
        yield Mismatch("finite_padding", need, "finite numbers are required", (fix,))
    yield from chunk_page_gaps(row, needs)
    linear = bool(needs.linear_layers)
    if row.with_linear_layers is not None and row.with_linear_layers != linear:
        gdn = () if linear else (LayerRequirements(kind="gdn"),)
        fix = Fix(
            "linear",
            (("layers", gdn),),
            FixCost.MODEL if linear else FixCost.KIND,
            "a model without linear layers" if linear else "a model with gdn layers",
        )
        requested = "full attention beside linear layers" if linear else "full attention alone"
        yield Mismatch("with_linear_layers", requested, "not supported", (fix,))


def _flag_gaps(
    row: Capabilities, needs: Requirements, phase: Phase, speculates: bool
) -> Iterator[Mismatch]:
    if needs.lse and not row.lse:
        yield _gap("lse", "asked", "", [_fix("no log-sum-exp output", FixCost.FEATURE, lse=False)])
    if needs.deterministic and not row.deterministic:
        fix = _fix("no determinism", FixCost.FEATURE, deterministic=False)
        yield _gap("deterministic", "asked", "", [fix])
    if needs.shared_prefix and not row.shared_prefix and (speculates or phase is Phase.DECODE):
        fix = _fix("every request on its own", FixCost.FEATURE, shared_prefix=False)
        yield _gap("shared_prefix", "asked", "", [fix])
    # verify and draft extend are captured as a whole, prefill never
    short = row.cuda_graph in (("never", "decode") if speculates else ("never",))
    if needs.graphs and short and (speculates or phase is Phase.DECODE):
        requested, supported = ("uniform", row.cuda_graph) if speculates else ("asked", "")
        spec = needs.speculation if speculates else None
        options = [] if spec is None else _verified_elsewhere(spec)
        without = _fix("no CUDA graphs", FixCost.FEATURE, graphs=False)
        yield _gap("cuda_graph", requested, supported, [without, *options])


def _verified_elsewhere(spec: Speculation) -> list[Fix]:
    """List the fixes after which the backend of this phase verifies no drafts."""
    mode: VerifyMode = "decode" if spec.mode == "prefill" else "prefill"
    text = f"--speculative-attention-mode {mode}"
    without = _fix("no speculation", FixCost.FEATURE + 1, speculation=None)
    return [without, Fix("speculation", (("mode", mode),), FixCost.FLAG + 1, text)]


def _speculation_gaps(
    row: Capabilities, needs: Requirements, speculates: bool
) -> Iterator[Mismatch]:
    spec = needs.speculation
    if spec is None:
        return
    session_topk = None if row.family == "linear" else row.max_session_topk
    limit = ANY_TOPK if session_topk is None else session_topk
    if speculates:
        limit = most_drafts(needs, min(limit, row.max_verify_topk))
    if spec.topk <= limit:
        return
    options = _verified_elsewhere(spec)[: 2 if speculates and row.family == "softmax" else 1]
    if limit >= 1:
        text = f"--speculative-eagle-topk {limit}"
        options.insert(0, Fix("speculation", (("topk", limit),), FixCost.FEATURE, text))
    supported = f"topk up to {limit}" if limit else "no speculation"
    yield _gap("speculative topk", spec.topk, supported, options)
