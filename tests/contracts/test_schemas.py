"""The recorded schemas of compiled ops are those in the wheels' shared libraries."""

from __future__ import annotations

import pathlib

import pytest
import torch
from leaves import LIBRARIES, Library, extract, read
from wheels import MISSING, folders


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda x: x.recorded.stem)
def test_what_is_recorded_is_what_the_wheel_has(library: Library) -> None:
    binary = library.binary()
    if binary is None:
        pytest.skip(f"{library.path} is not here" if folders() else MISSING)
    assert extract(binary, library.ops) == read(library)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda x: x.recorded.stem)
def test_every_op_has_a_schema_that_torch_reads(library: Library) -> None:
    recorded = read(library)
    assert sorted(recorded) == sorted(library.ops)
    for name, schema in recorded.items():
        parsed = torch._C.parse_schema(schema)
        assert ".".join(x for x in (parsed.name, parsed.overload_name) if x) == name


def test_a_schema_is_found_among_other_text(tmp_path: pathlib.Path) -> None:
    binary = tmp_path / "ops.so"
    texts = (
        "fwd() takes no",
        "fwd(Tensor q) -> Tensor",
        "bwd(Tensor q) -> ()",
        "xfwd(int a) -> ()",
    )
    binary.write_bytes(b"\x7fELF\0" + b"\0".join(t.encode() for t in texts) + b"\0")
    assert extract(binary, ("fwd",)) == {"fwd": "fwd(Tensor q) -> Tensor"}
