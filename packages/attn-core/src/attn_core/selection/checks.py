"""Refuse what select() cannot answer: values of another type, flags without an effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry
from attn_core.selection.ranking import RowJudge
from attn_core.selection.result import Overrides
from attn_core.selection.sub_backends import check_sub_backends, flag_of
from attn_core.spec.device import Device
from attn_core.spec.requirements import Requirements, check_type, is_count

# Flags of softmax layers, and of linear ones, as fields of Overrides.
BACKEND_ARGUMENTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
LINEAR_ARGUMENTS = (
    "linear_attn_backend",
    "linear_attn_prefill_backend",
    "linear_attn_decode_backend",
)


def check_types(
    requirements: Any,
    device: Any,
    registry: Any,
    libraries: Any,
    overrides: Any,
    profile: Any,
    workload: Any,
) -> None:
    """Raise UsageError for an argument of select() of another type."""
    check_type("requirements", requirements, Requirements, "Requirements")
    check_type("device", device, Device, "a Device: parse_device('cpu'), probe_device()")
    check_type("registry", registry, Registry, "a Registry: load_plugins()")
    check_type("libraries", libraries, Mapping, "distribution → version, or None as version")
    for name, value, kind in (
        ("overrides", overrides, Overrides),
        ("profile", profile, Profile),
        ("workload", workload, Workload),
    ):
        if value is not None:
            check_type(name, value, kind, f"{kind.__name__}, or None")
    for name, value in vars(overrides or Overrides()).items():
        if name in ("prefer", "deny") or (name == "allow" and value is not None):
            if isinstance(value, str) or not isinstance(value, Collection):
                raise UsageError(f"{name} is {value!r} (expected a tuple of names)")
        elif value is not None:
            check_type(name, value, str, "a name")


def check_flags(s: RowJudge) -> None:
    """Raise UsageError for a flag of which the model has nothing, and for a page size below 1."""
    o = s.overrides
    for fields, served, what in (
        (LINEAR_ARGUMENTS, s.needs.linear_layers, "no linear attention layers"),
        (BACKEND_ARGUMENTS, s.needs.softmax_layers, "no softmax attention layers"),
        (("mm_attention_backend",), s.needs.vision, "no vision tower"),
    ):
        named = [flag_of(field) for field in fields if getattr(o, field)]
        if named and not served:
            raise UsageError(f"{', '.join(named)}: the model has {what}; drop the flag")
    check_sub_backends(o, s.needs, s.registry)
    if s.needs.page_size is not None and not is_count(s.needs.page_size):
        raise UsageError(f"--page-size {s.needs.page_size}: at least 1, an integer")
