"""Every emulated function has exactly the parameters of the vendor's own, read from its wheel."""

from __future__ import annotations

import pathlib

import attn_nvidia
import attn_rocm
import pytest
from offered import emulated, reached
from signatures import Sources, compare, differences, parameters
from wheels import HELPERS, MISSING, VENDOR, emulators, folders, libraries, pinned, version_of

WHEELS = libraries()
OURS = [pathlib.Path(package.__file__).parent for package in (attn_nvidia, attn_rocm)]
USED = {name for folder in OURS for name in reached(folder)}
needs_wheels = pytest.mark.skipif(not folders(), reason=MISSING)


@pytest.mark.parametrize(("module", "name"), emulated(emulators(), WHEELS, HELPERS, USED))
def test_emulated_as_the_library_has_it(module: str, name: str) -> None:
    if not folders() and WHEELS.module(module) is None:
        pytest.skip(MISSING)
    assert compare(emulators(), WHEELS, module, name) == []


@needs_wheels
@pytest.mark.parametrize(("distribution", "version"), pinned().items())
def test_the_wheels_are_those_that_are_pinned(distribution: str, version: str) -> None:
    result = {v for f in folders() if (v := version_of(f, distribution))}
    assert result == {version}, f"{distribution}: put {version} into ATTN_WHEELS"


@pytest.mark.parametrize("info", sorted(VENDOR.glob("*.dist-info")), ids=lambda p: p.name)
def test_an_emulation_claims_the_version_it_was_compared_with(info: pathlib.Path) -> None:
    name, version = info.name.removesuffix(".dist-info").split("-")
    distribution = name.replace("_", "-")
    if distribution == "flash-attn-3":
        pytest.skip("flash-attn-3 is built from source: no wheel of it is on the index")
    assert version == pinned()[distribution]


# that these comparisons can fail

LIBRARY = """
from typing import overload
from .impl import attend as attend
from .impl import *
alias = attend

class Base:
    def plan(self, indptr, /, *, causal: bool = False): ...

class Wrapper(Base):
    layout: str = "NHD"
    def __init__(self, workspace, backend="auto"): ...
    @overload
    def run(self, q): ...
    def run(self, q, out=None, *args): ...
    forward = run
    @property
    def resolved(self): ...
    @staticmethod
    def make(): ...

def build(dtype):
    def call(q): ...
    return call

def _fast(q): ...
"""
IMPL = "def attend(q, k, scale=1e-1, window=(-1, -1), dtype=torch.half, *, lse=False): ...\n"


def sources(folder: pathlib.Path, **files: str) -> Sources:
    """Write the modules of a package `lib` and return it as sources."""
    for name, text in files.items():
        path = folder / "lib" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources((folder,))


@pytest.fixture
def library(tmp_path: pathlib.Path) -> Sources:
    return sources(tmp_path / "wheel", __init__=LIBRARY, impl=IMPL)


def test_what_is_the_same_passes(tmp_path: pathlib.Path, library: Sources) -> None:
    mine = sources(
        tmp_path / "mine",
        __init__="from lib._ours import *\nfrom lib._ours import attend, Wrapper, build\n",
        _ours=(LIBRARY.replace("from .impl", "# ") + IMPL).replace("1e-1", "0.1"),
    )
    assert emulated(mine, library) == [("lib", "attend"), ("lib", "Wrapper"), ("lib", "build")]
    for module, name in emulated(mine, library):
        assert compare(mine, library, module, name) == []


DOCTORED = [
    ("scale=1e-1", "scale=1.0", "attend", "scale=1.0, the library's is scale=0.1"),
    ("q, k,", "k, q,", "attend", "order k, q"),
    ("q, k,", "q,", "attend", "has no k"),
    ("*, lse", "lse", "attend", "lse=False, the library's is lse=False [keyword only]"),
    ("dtype=torch.half", "dtype=torch.float", "attend", "dtype=torch.float"),
    ("(-1, -1)", "(-1, 0)", "attend", "window=(-1, 0)"),
    ("lse=False", "lse=False, sinks=None", "attend", "sinks=None [keyword only] is not"),
    ("def attend", "def attent", "attend", "neither a function"),
    ('backend="auto"', 'backend="fa2"', "Wrapper", "__init__: backend='fa2'"),
    ("def __init__", "def _init", "Wrapper", "Wrapper has no __init__"),
    ("out=None, *args", "out=None", "Wrapper", "run: has no *args"),
    ("indptr, /", "indptr", "Wrapper", "plan: indptr"),
    ("@property", "", "Wrapper", "resolved is a function, the library's is a property"),
    ("@staticmethod", "@classmethod", "Wrapper", "make is a classmethod"),
    ('layout: str = "NHD"', 'layout: str = "HND"', "Wrapper", "layout = 'HND'"),
    ("def make", "def begin", "Wrapper", "the library's Wrapper has no begin"),
    ("def call(q)", "def call(k)", "build", "build.call: has no q"),
    ("class Wrapper(Base)", "def Wrapper()", "Wrapper", "is a function, the library's is a class"),
]


@pytest.mark.parametrize(("old", "new", "name", "said"), DOCTORED, ids=lambda x: x or "nothing")
def test_a_doctored_signature_is_found(
    tmp_path: pathlib.Path, library: Sources, old: str, new: str, name: str, said: str
) -> None:
    assert old in LIBRARY + IMPL
    mine = sources(
        tmp_path / "mine", __init__=LIBRARY.replace(old, new), impl=IMPL.replace(old, new)
    )
    assert said in "; ".join(compare(mine, library, "lib", name))


def test_what_the_library_does_not_have_is_found(tmp_path: pathlib.Path, library: Sources) -> None:
    mine = sources(
        tmp_path / "mine",
        decode="from lib._own import check\ndef attend(q): check(q)\ndef _own(): ...\n",
        _own="def check(q): ...\n",
    )
    assert emulated(mine, library) == [("lib.decode", "attend")]
    assert compare(mine, library, "lib.decode", "attend") == [
        "the library has no lib.decode.attend"
    ]


def test_a_private_name_counts_where_our_code_takes_it(tmp_path: pathlib.Path) -> None:
    library = sources(tmp_path / "wheel", __init__=LIBRARY)
    mine = sources(tmp_path / "mine", __init__="def _fast(k): ...\ndef _own(): ...\n")
    code = sources(tmp_path / "ours", a="import lib\nlib._fast(1)\nself._own()\n").roots[0]
    assert emulated(mine, library, used=reached(code).keys()) == [("lib", "_fast")]
    assert compare(mine, library, "lib", "_fast") == [
        "_fast: has no q",
        "_fast: k is not the library's",
    ]


def test_aliases_and_imports_are_followed(library: Sources) -> None:
    result = library.find("lib", "alias")
    assert result is not None
    assert result.module.name == "lib.impl"
    assert [p.name for p in parameters(result.node)] == [
        "q",
        "k",
        "scale",
        "window",
        "dtype",
        "lse",
    ]
    assert library.find("lib", "nothing") is None
    assert differences(parameters(result.node), parameters(result.node)) == []
