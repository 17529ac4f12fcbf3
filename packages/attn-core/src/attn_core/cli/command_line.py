"""Apply suggested changes to the flags of a command, and print the flags as a command line."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from packaging.utils import canonicalize_name

from attn_core.cli.inputs import SHAPE, selection_inputs
from attn_core.cli.options import InputFlags, names
from attn_core.errors import UsageError
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import Registry
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.mismatch import Fix
from attn_core.spec.device import Device
from attn_core.spec.kinds import LINEAR_KINDS

LISTS = ("prefer", "allow", "deny")


def changed_flags(flags: InputFlags, fixes: tuple[Fix, ...]) -> tuple[InputFlags, tuple[Fix, ...]]:
    """Return the flags after the fixes, and the fixes that no flag says.

    Those are an installation on this machine, and another model where --model names one.
    """
    remaining = []
    for fix in fixes:
        values = _values(flags, fix)
        if values is None:
            remaining.append(fix)
        else:
            flags = replace(flags, **values)
    return flags, tuple(remaining)


def _values(flags: InputFlags, fix: Fix) -> dict[str, Any] | None:
    values = dict(fix.values)
    if fix.target == "overrides":
        return {
            name: ([",".join(value)] if value else None) if name in LISTS else value
            for name, value in values.items()
        }
    if fix.target == "speculation":
        short = {"topk": "speculative_eagle_topk", "mode": "speculative_attention_mode"}
        return {short[name]: value for name, value in values.items()}
    if fix.target == "requirements":
        if "speculation" in values:
            names = ("eagle_topk", "attention_mode", "num_draft_tokens")
            return {f"speculative_{name}": None for name in names}
        plain_flags = {"dtype", "kv_cache_dtype", "page_size", "deterministic", "shared_prefix"}
        return values if set(values) <= plain_flags else None
    if fix.target == "device":
        device_flag = (
            {"device": str(Device(values["type"], values["arch"]))} if "type" in values else {}
        )
        return device_flag | ({"runtime_version": values["runtime"]} if "runtime" in values else {})
    if fix.target == "libraries":
        return _installed(flags, set(values))
    return _shape(flags, fix, values)


def _installed(flags: InputFlags, distributions: set[str]) -> dict[str, Any] | None:
    """Add libraries to --assume-installed. Without that flag, this machine's libraries count."""
    if flags.assume_installed is None:
        return None
    libraries = []
    for name in names(flags.assume_installed):
        if name == "all" or canonicalize_name(alternatives(name)[0].name) not in distributions:
            libraries.append(name)
    return {
        "assume_installed": [
            ",".join([*libraries, *(() if "all" in libraries else sorted(distributions))])
        ]
    }


def _shape(flags: InputFlags, fix: Fix, values: dict[str, Any]) -> dict[str, Any] | None:
    linear = flags.kind in LINEAR_KINDS
    if flags.model is not None or fix.target == "vision":
        return None
    if fix.target == "linear":
        kinds = [x.kind for x in values.get("layers", ())] or [values.get("kind")]
        plain = flags.kind in (None, "mha") or linear
        new_layers = values.keys() & {"kind", "layers"}  # a new kind leaves all dims open
        dims = [values[name] for name in values.keys() - new_layers]
        return {"kind": kinds[0]} if plain and new_layers and not any(dims) else None
    if not set(values) <= set(SHAPE) or ("kind" in values and linear):
        return None
    for name in ("num_q_heads", "num_kv_heads"):  # the rows speak of one rank's
        if values.get(name):
            values[name] *= flags.tp
    return values


def applier(flags: InputFlags, registry: Registry) -> Any:
    """Return a function that applies fixes and returns the inputs of their command line."""
    cache: dict[str, SelectionInputs | None] = {}

    def apply(fixes: tuple[Fix, ...]) -> SelectionInputs | None:
        changed, remaining = changed_flags(flags, fixes)
        key = repr(changed)
        if key not in cache:
            try:
                cache[key] = selection_inputs(changed, registry)
            except UsageError:
                cache[key] = None
        inputs = cache[key]
        return None if inputs is None else inputs.apply(remaining)

    return apply


def written(command: str, flags: InputFlags) -> str:
    """Return a command line. It unsets environment variables whose flags it omits."""
    args, unset = ["attn", command], []
    hints = get_type_hints(InputFlags, include_extras=True)
    for f in fields(flags):
        value, option = getattr(flags, f.name), hints[f.name].__metadata__[0]
        if value == f.default:
            if option.envvar and os.environ.get(option.envvar):
                unset += ["-u", option.envvar]
            continue
        args.append("--" + f.name.replace("_", "-"))
        if value is not True:
            args.append(_text(value))
    return shlex.join([*(["env", *unset] if unset else []), *args])


def _text(value: str | float | Path | list[str]) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, list) else str(value)
