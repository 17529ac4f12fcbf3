"""Validate a plugin's declarations: every field by type, then by value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from attn_core.dtypes import KV_DTYPES, PLAIN_DTYPES
from attn_core.formatting import listing, printable
from attn_core.plugins.dependencies import Pin, alternatives
from attn_core.spec.capabilities import BackendSpec, Capabilities, KnownBad
from attn_core.spec.kinds import Phase
from attn_core.spec.page_size import takes_page

# A declaration is read by every command: it stays small enough to be weighed in no time.
MAX_BACKENDS = 64  # of one plugin
MAX_ROWS = 96  # of all backends of one plugin
MAX_ITEMS = 1024  # of a set, a list or a mapping in a row
MAX_NUMBER = 1 << 31
MAX_NAME, MAX_TEXT = 64, 1000  # characters
LAYOUTS = frozenset({"NHD", "HND"})


def _parses(parse: Callable[[str], object]) -> Callable[[Any], bool]:
    def ok(text: str) -> bool:
        try:
            parse(text)
        except ValueError:  # what packaging raises is one
            return False
        return True

    return ok


def _class_name(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), name])


def _positive(values: Any) -> bool:
    return values == "any" or all(_positive(v) if isinstance(v, tuple) else v > 0 for v in values)


# Beyond the type of a field: what holds of its value, and that in words. None is always fine.
VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (bool, "not empty"),
    "create": (_class_name, "'module:Class'"),
    "capabilities": (bool, "at least one"),
    "device": (lambda v: v and ":" not in v, "a type or 'any'; its architectures are archs"),
    "dtypes": (lambda v: v and v <= PLAIN_DTYPES, f"of {', '.join(sorted(PLAIN_DTYPES))}"),
    "kv_dtypes": (lambda v: v and v <= KV_DTYPES, f"of {', '.join(sorted(KV_DTYPES))}"),
    "layouts": (lambda v: v and v <= LAYOUTS, f"of {', '.join(sorted(LAYOUTS))}"),
    "phases": (bool, "at least one"),
    "min_runtime": (_parses(Version), "a version like 12.8"),
    "requires": (
        lambda v: all(map(_parses(alternatives), v)),
        "requirements like 'triton>=3.4 or pytorch-triton-rocm>=3.4'",
    ),
    "libraries": (
        lambda v: all(map(_parses(Requirement), v)),
        "requirements like 'triton==3.5.*'",
    ),
    "source": (bool, "not empty"),
    "torch": (_parses(SpecifierSet), "a specifier like '==2.13.*'"),
    "version": (_parses(SpecifierSet), "a specifier like '==0.4.8'"),
    **dict.fromkeys(
        ("page_sizes", "head_dims", "head_dim_pairs", "q_heads", "group_sizes"),
        (_positive, "above 0"),
    ),
    **dict.fromkeys(("max_page_size", "preferred_page_size"), (lambda v: v > 0, "above 0")),
    **dict.fromkeys(("max_verify_topk", "max_session_topk"), (lambda v: v >= 0, "0 or more")),
}
RECORDS: tuple[type, ...] = (BackendSpec, Capabilities, KnownBad, Pin)
HINTS = {record: get_type_hints(record) for record in RECORDS}
PLURAL = {AbstractSet: "a set of", Sequence: "a list of", tuple: "a pair of"}


def too_many(specs: Sequence[object], pins: Sequence[object] = ()) -> str | None:
    """Return the error if a plugin registers more backends or rows than allowed, else None."""
    rows = sum(len(spec.capabilities) for spec in specs if type(spec) is BackendSpec)
    counts = {"backends": (len(specs), MAX_BACKENDS), "rows": (rows, MAX_ROWS)}
    for noun, (count, limit) in {**counts, "pins": (len(pins), MAX_ITEMS)}.items():
        if count > limit:
            return f"registers {count} {noun} (at most {limit}); leave out those that differ least"
    return None


def problem(spec: object) -> str | None:
    """Return what is wrong with the result of attn_register_backends, or None if it is valid."""
    if type(spec) is not BackendSpec:
        return f"attn_register_backends returned a {type(spec).__name__}, not a BackendSpec"
    error = _fields(spec)
    if error is not None:
        return error
    for name in (spec.name, *spec.aliases):
        if not 0 < len(name) <= MAX_NAME or set(name) & set(" ,"):  # what flags split names at
            return f"name {name!r} (expected 1 to {MAX_NAME} characters without blank and comma)"
    valid = dict(_valid_defaults(Capabilities))
    for number, row in enumerate(spec.capabilities):
        if (error := _fields(row, valid) or _page_problem(row)) is not None:
            return f"row {number}: {error}" if len(spec.capabilities) > 1 else error
        if not row.absorbed and (row.phases != {Phase.PREFILL} or row.max_verify_topk):
            return (
                f"row {number}: absorbed False (expected with phase prefill alone and "
                "max_verify_topk 0)"
            )
    for known_bad in spec.known_bad:
        if (error := _fields(known_bad)) is not None:
            return f"known_bad: {error}"
    families = {row.family for row in spec.capabilities}
    return "rows of both families, softmax and linear" if len(families) > 1 else None


def _page_problem(row: Capabilities) -> str | None:
    """Say which page size of a row no pool would have, or is not explained."""
    most, preferred, sizes = row.max_page_size, row.preferred_page_size, listing(row.page_sizes)
    if most is not None and row.page_sizes and most < min(row.page_sizes):
        return f"max_page_size {most} (expected {min(row.page_sizes)} or more, of page_sizes)"
    if preferred is not None and not takes_page(row, preferred):
        return f"preferred_page_size {preferred} (expected a size that the row takes: {sizes})"
    if preferred is not None and not row.preferred_page_reason:
        return f"preferred_page_size {preferred} without preferred_page_reason, what was measured"
    return None


def pin_problem(pin: object) -> str | None:
    """Return what is wrong with the result of attn_register_pins, or None if it is valid."""
    if type(pin) is not Pin:
        return f"attn_register_pins returned a {type(pin).__name__}, not a Pin"
    return _fields(pin)


def _fields(
    record: BackendSpec | Capabilities | KnownBad | Pin, valid: dict[str, object] | None = None
) -> str | None:
    """Return what is wrong with the fields of a record, or None.

    valid: values of fields that were found valid, by name; updated. Most rows share most values.
    """
    kind: type = type(record)
    valid = dict(_valid_defaults(kind)) if valid is None else valid
    for name in HINTS[kind]:
        value = getattr(record, name)
        if value is not valid.get(name, MISSING):
            if (error := _field(kind, name, value)) is not None:
                return error
            valid[name] = value
    return None


@functools.cache
def _valid_defaults(record: type) -> Mapping[str, object]:
    """Return the defaults of a record's fields, by name, without those that are invalid."""
    defaults = {f.name: f.default for f in fields(record) if f.default is not MISSING}
    return {name: x for name, x in defaults.items() if _field(record, name, x) is None}


def _field(record: type, name: str, value: object) -> str | None:
    hint = HINTS[record][name]
    if (limit := _exceeded_limit(value)) is not None:
        return f"{name} {_show(value)} (expected {limit})"
    holds, text = VALUES.get(name, (None, ""))
    if not _fits(hint)(value) or (holds and value is not None and not holds(value)):
        expected = f"{_type_text(hint)}, {text}" if text else _type_text(hint)
        return f"{name} {_show(value)} (expected {expected})"
    return None


def _exceeded_limit(value: object) -> str | None:
    """Say what a value exceeds that is too large, or too odd, to be weighed and printed."""
    if isinstance(value, str):
        fits = len(value) <= MAX_TEXT and value.isprintable()
        return None if fits else f"at most {MAX_TEXT} characters, all of them printable"
    if isinstance(value, int):
        return None if abs(value) <= MAX_NUMBER else f"at most {MAX_NUMBER}"
    if not isinstance(value, Collection):
        return None
    if len(value) > MAX_ITEMS:
        return f"at most {MAX_ITEMS} elements"
    for part in (*value, *value.values()) if isinstance(value, Mapping) else value:
        if (limit := _exceeded_limit(part)) is not None:
            return limit
    return None


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """Return what says whether a value is of a type hint, its elements included.

    Classes are compared, so that True is no int, and a subclass of a row is no row.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda value: type(value) is str and value in inner
    if origin is None:
        return lambda value: type(value) is hint
    parts = [_fits(argument) for argument in inner]
    if origin in (Union, UnionType):
        return lambda value: any(fits(value) for fits in parts)
    first, last = parts[0], parts[-1]
    if origin is tuple:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(fits(v) for v, fits in zip(value, parts, strict=True))
        )
    if issubclass(origin, Mapping):
        return lambda value: (
            isinstance(value, Mapping) and all(first(k) and last(v) for k, v in value.items())
        )
    return lambda value: isinstance(value, origin) and all(map(first, value))


def _type_text(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(_type_text, inner))
    if origin is Mapping:
        return f"a mapping of {_type_text(inner[0])} to {_type_text(inner[1])}"
    if origin is not None:
        return f"{PLURAL[origin]} {_type_text(inner[0])}"
    names = {str: "text", bool: "True or False", NoneType: "None"}
    return names.get(hint) or str(hint.__name__)


def _show(value: object) -> str:
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) > MAX_ITEMS:
        return f"of {len(value)} elements"
    try:
        text = repr(value)
        if isinstance(value, frozenset):
            text = "{" + ", ".join(sorted(map(repr, value))) + "}"
    except Exception as error:  # a value's own code, or an int of thousands of digits
        return f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    return printable(text if len(text) <= 100 else text[:97] + "...")
