"""Turn the flags of a command into the inputs of select(), and record every assumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, get_args

from attn_core.cli.options import DTYPES, KV_DTYPES, InputFlags, names
from attn_core.costs import settings, store
from attn_core.costs.profile import Profile
from attn_core.errors import UsageError
from attn_core.formatting import near
from attn_core.plugins.dependencies import Libraries, alternatives, parse_libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.inputs import SelectionInputs
from attn_core.spec.device import RUNTIMES, Device, devices_of, parse_device, probe_device
from attn_core.spec.kinds import LINEAR_KINDS, Kind
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation

SHAPE = (
    "kind",
    "head_dim",
    "v_head_dim",
    "num_q_heads",
    "num_kv_heads",
    "sliding_window",
    "logit_cap",
    "sinks",
)
LIMIT = 1 << 31  # above any true size, as in a model's config
COUNTS = ("tp", *(name for name in SHAPE if name not in ("kind", "sinks")))


def selection_inputs(flags: InputFlags, registry: Registry) -> SelectionInputs:
    """Return the inputs of select() for the flags. Raises UsageError, ModelConfigError."""
    detected = probe_device()
    types = {r.device for s in registry.backends.values() for r in s.capabilities} - {"any"}
    text = detected.type if flags.device is None else flags.device
    device = parse_device(text, flags.runtime_version, types, detected)
    if flags.device is None:
        device = detected
    local = next((d for d in devices_of(detected) if str(d) == str(device)), None)
    same = local is not None and device.name in (None, local.name)  # "h200" is no other sm90
    if local and same:  # one that is named keeps the documented order, also on its own machine
        device = replace(device, runtime=flags.runtime_version or local.runtime)
    libraries, assumed = _libraries(flags, registry, same)
    if device.runtime is None and device.type in RUNTIMES:
        assumed.append(f"the runtime version of {device.type} is unknown: taken as the newest")
    needs = _requirements(flags, assumed)
    simulated = not same or flags.assume_installed is not None
    profile = _profile(flags, device, registry, libraries, simulated)
    workload = settings.workload(flags.workload)
    return SelectionInputs(
        needs, device, libraries, flags.overrides(), simulated, profile, workload
    )


def _profile(
    flags: InputFlags, device: Device, registry: Registry, libraries: Libraries, simulated: bool
) -> Profile | None:
    """Return the named profile, else what was tuned here, else None, which is what is shipped.

    Raises UsageError for a profile of another environment, with what differs.
    """
    if simulated and flags.profile is None:
        return None
    if not simulated or flags.profile == settings.NONE:
        return settings.profile_here(flags.profile, registry, device)
    profile = store.read_profile(Path(str(flags.profile)))
    # what is assumed to be installed has any version
    installed = {name: libraries[name] for name in profile.environment if name in libraries}
    measured = {name: profile.environment[name] for name in installed}
    differs = Profile(environment=measured).differences(installed)
    if device.name is not None and profile.device != device.name:
        differs.append(f"device was {profile.device} and is {device.name}")
    settings.refuse_foreign(differs, str(flags.profile))
    return profile


def _libraries(
    flags: InputFlags, registry: Registry, same: bool
) -> tuple[dict[str, str | None], list[str]]:
    assumed = names(flags.assume_installed)
    if flags.assume_installed and not assumed:
        raise UsageError(
            f"--assume-installed {','.join(flags.assume_installed)!r} names no library; name at "
            "least one, or all, or leave the flag out"
        )
    explicit = [name for name in assumed if name != "all"]
    all_libraries: dict[str, str | None] = dict.fromkeys(parse_libraries(_all_names(registry)))
    optional = [name for spec in registry.backends.values() for name in spec.optional]
    pinned, known = parse_libraries(explicit), [*all_libraries, *optional, "torch"]
    for name in pinned:
        if name not in known:
            raise UsageError(
                f"--assume-installed {name}: no backend requires it; {near(name, known)}"
            )
    installed: dict[str, str | None] = dict(registry.installed_libraries()) if same else {}
    if "all" in assumed or not (same or assumed):
        exact = f"; exactly: {', '.join(explicit)}" if explicit else ""
        return all_libraries | pinned, [f"every library counts as installed, new enough{exact}"]
    if explicit:
        text = f"installed: {', '.join(explicit)}" + ("" if same else ", no other library")
        return installed | pinned, [text]
    return installed, []


def _requirements(flags: InputFlags, assumed: list[str]) -> Requirements:
    speculation = _speculation(flags, assumed)
    check("--kv-cache-dtype", flags.kv_cache_dtype, KV_DTYPES)
    check("--dtype", flags.dtype, DTYPES)
    for name in COUNTS:
        value = getattr(flags, name)
        if value is not None and not 0 < value < LIMIT:  # NaN is not above 0 either
            raise UsageError(f"{_option(name)} {value}: above 0, below {LIMIT}")
    if flags.model is not None:
        return _of_model(flags, flags.model, speculation, assumed)
    vision = LayerRequirements(encoder=True) if flags.mm_attention_backend else None
    if vision is not None:
        assumed.append("--mm-attention-backend without --model: a vision tower of any shape")
    return Requirements(
        layers=_layers(flags, assumed),
        vision=vision,
        dtype=flags.dtype or "bf16",
        kv_cache_dtype=flags.kv_cache_dtype,
        page_size=flags.page_size,
        speculation=speculation,
        deterministic=flags.deterministic,
        shared_prefix=flags.shared_prefix,
        assumptions=tuple(assumed),
    )


def _of_model(
    flags: InputFlags, model: Path, speculation: Speculation | None, assumed: list[str]
) -> Requirements:
    from attn_core.model_config import read_config, requirements_from_config

    shape_options = [_option(n) for n in SHAPE if getattr(flags, n) not in (None, False)]
    if shape_options:
        raise UsageError(
            f"{', '.join(shape_options)} cannot be combined with --model, which sets the shape; "
            "drop one"
        )
    needs = requirements_from_config(
        read_config(model),
        tp=flags.tp,
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        page_size=flags.page_size,
        speculation=speculation,
    )
    assumptions = (*needs.assumptions, *assumed)
    return replace(
        needs,
        deterministic=flags.deterministic,
        shared_prefix=flags.shared_prefix,
        assumptions=assumptions,
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _layers(flags: InputFlags, assumed: list[str]) -> tuple[LayerRequirements, ...]:
    kind = cast(Kind, check("--kind", flags.kind, get_args(Kind)) or "mha")
    linear = (LayerRequirements(kind=kind),) if kind in LINEAR_KINDS else ()
    if linear:
        assumed.append(f"{kind} layers beside full attention (mha)")
        kind = "mha"
    d, dv = flags.head_dim, flags.v_head_dim
    if dv is not None and d is None:
        raise UsageError(f"--v-head-dim {dv} without --head-dim: give both")
    if kind in ("mla", "dsa") and d is None and dv is None:
        d, dv = 576, 512
        assumed.append(f"{kind}: latent 512 + rope 64")
    index = (2048, 64, 128) if kind == "dsa" else (None, None, None)
    if kind == "dsa":
        assumed.append("dsa: an indexer of 64 heads of 128 that selects 2048 keys")
    shape = {"num_q_heads": flags.num_q_heads, "num_kv_heads": flags.num_kv_heads}
    unset = [n for n, v in {"head_dim": d, **shape}.items() if v is None]
    if unset:
        assumed.append(f"{', '.join(unset)} not given: constrains nothing")
    q, kv = _heads(flags, assumed)
    layer = LayerRequirements(
        kind=kind,
        head_dim=d,
        v_head_dim=dv,
        num_q_heads=q,
        num_kv_heads=kv,
        sliding_window=flags.sliding_window,
        logit_cap=flags.logit_cap,
        sinks=flags.sinks,
        index_topk=index[0],
        index_heads=index[1],
        index_dim=index[2],
    )
    return (layer, *linear)


def _heads(flags: InputFlags, assumed: list[str]) -> tuple[int | None, int | None]:
    """Return one rank's query and KV heads, by the rule used for a model's config."""
    q, kv, tp = flags.num_q_heads, flags.num_kv_heads, flags.tp
    owner = "--num-q-heads and --num-kv-heads"
    if q is None or kv is None:
        owner += " (the one not given was taken to fit)"
    from attn_core.model_config.heads import rank_heads  # start-up: rarely needed
    from attn_core.model_config.keys import Keys

    keys = Keys({}, owner, notes=assumed)
    rank = rank_heads(keys, q or (kv or 1) * tp, kv or q or 1, tp)
    return q and rank[0], kv and rank[1]


def _speculation(flags: InputFlags, assumed: list[str]) -> Speculation | None:
    topk, mode = flags.speculative_eagle_topk, flags.speculative_attention_mode
    check("--speculative-attention-mode", mode, ("prefill", "decode"))
    drafts = flags.speculative_num_draft_tokens
    if topk is None:
        options = {"attention-mode": mode, "num-draft-tokens": drafts}
        for name in (name for name, value in options.items() if value is not None):
            raise UsageError(
                f"--speculative-{name} without --speculative-eagle-topk: "
                "there is nothing to verify; add --speculative-eagle-topk 1"
            )
        return None
    assumed.append(f"--speculative-eagle-topk {topk} turns speculation on")
    chosen: Literal["prefill", "decode"] = "decode" if mode == "decode" else "prefill"
    speculation = Speculation(topk=topk, mode=chosen)
    return speculation if drafts is None else replace(speculation, num_draft_tokens=drafts)


def check(option: str, value: str | None, choices: tuple[str, ...]) -> str | None:
    """Refuse a value that is not in `choices`; the error suggests similar ones."""
    if value is not None and value not in choices:
        raise UsageError(f"{option} {value}: {near(value, choices)}")
    return value


def _all_names(registry: Registry) -> list[str]:
    return sorted({w.name for group in registry.requires() for w in alternatives(group)})


def must_be_here(inputs: SelectionInputs, local: Device, action: str) -> None:
    """Refuse a simulated device or assumed libraries: kernels need real ones.

    action: what runs them: "a warm-up".
    """
    if not inputs.simulated:
        return
    present = [str(device) for device in devices_of(local)]
    if str(inputs.device) in present:
        raise UsageError(
            f"--assume-installed: {action} runs kernels, so it takes the libraries that are "
            "installed; leave it out"
        )
    raise UsageError(
        f"--device {inputs.device}: {action} runs kernels, and this machine has "
        f"{' and '.join(present)}; leave --device out, or run the command on a machine that "
        "has one"
    )
