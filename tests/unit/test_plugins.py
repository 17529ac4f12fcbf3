"""A broken plugin is listed with its error and its distribution and takes nothing else down."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import attn_core
import pytest
import strategies as gen
from attn_core.errors import UnknownBackendError, UsageError
from attn_core.plugins import validation as declared
from attn_core.plugins.dependencies import Pin
from attn_core.plugins.hookspecs import hookimpl
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import torch_build
from attn_core.spec.requirements import Speculation

ROOT = Path(__file__).parents[2]
ACME = "docs/examples/attn-acme"
ROW = Capabilities(
    kind="mha", device="any", dtypes=["bf16"], kv_dtypes=["bf16"], priority=1, requires=["acme>=2"]
)
GDN = Capabilities(kind="gdn", device="any", dtypes={"bf16"}, kv_dtypes={"fp32"}, priority=1)


def spec(name="fine", row=ROW, **kw):
    return BackendSpec(name=name, capabilities=[row], create="a.b:C", **kw)


FINE = gen.point("attn-fine", [spec()])


class WrongArguments:
    @staticmethod
    @hookimpl
    def attn_register_backends(everything):
        return []


class NoHook:
    pass


class Misspelt:
    """A second hook of another name, which nobody would ever call."""

    @staticmethod
    @hookimpl
    def attn_register_backends():
        return [spec("misspelt")]

    @staticmethod
    @hookimpl
    def attn_register_pin():
        return []


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (
            gen.FakePoint("p", ImportError("no module named acme"), gen.FakeDist("bad")),
            "ImportError: no module named acme",
        ),
        (gen.FakePoint("p", SystemExit(3), gen.FakeDist("bad")), "SystemExit: 3"),
        (gen.point("bad", ValueError("boom")), "ValueError: boom"),
        (gen.point("bad", "text"), "a hook returned str, not a list"),
        (gen.point("bad", ["text"]), "returned a str, not a BackendSpec"),
        (gen.point("bad", [spec(name="")]), "name '' (expected text, not empty)"),
        (
            gen.point("bad", [spec(name="bad", row="row")]),
            "capabilities ('row',) (expected a list of Capabilities",
        ),
        (
            gen.point("bad", [BackendSpec(name="b", capabilities=[], create="a:b")]),
            "capabilities () (expected a list of Capabilities, at least one)",
        ),
        (
            gen.point("bad", [BackendSpec(name="b", capabilities=[ROW], create="nowhere")]),
            "create 'nowhere' (expected text or None, 'module:Class')",
        ),
        (
            gen.point("bad", [BackendSpec(name="b", capabilities=[ROW, GDN], create="a:b")]),
            "rows of both families, softmax and linear",
        ),
        (
            gen.point(
                "bad",
                [
                    spec(
                        row=Capabilities(
                            kind="mhla",
                            device="any",
                            dtypes=["bf16"],
                            kv_dtypes=["bf16"],
                            priority=1,
                        )
                    )
                ],
            ),
            "kind 'mhla' (expected 'mha', 'mla', 'dsa', 'gdn', 'kda')",
        ),
        (
            gen.point("bad", [spec()], requires=("attn-core>=0.2",)),
            "requires attn-core>=0.2, 0.1.0 is installed",
        ),
        (
            gen.point("bad", [spec()], requires=("attn-core==2.*",)),
            "0.1.0 is installed; pip install 'attn-core==2.*' or another version of the plugin",
        ),
        (
            gen.point("bad", [spec()], requires=("torch>=2", "attn-core")),
            "pins no version of attn-core, 0.1.0 is installed",
        ),
        (
            gen.point("bad", [spec()], requires=('attn-core==0.1.*; extra == "test"',)),
            "add 'attn-core==0.1.*' to the dependencies in its pyproject.toml",
        ),
        (
            gen.FakePoint("p", gen.plugin([spec()]), gen.FakeDist("bad", requires=None)),
            "pins no version of attn-core",
        ),
        (gen.FakePoint("p", GeneratorExit("odd"), gen.FakeDist("bad")), "GeneratorExit: odd"),
        (gen.point("bad", None), "a hook returned None, not a list"),
        (gen.point("bad", []), "registers nothing"),
        (gen.FakePoint("p", NoHook(), gen.FakeDist("bad")), "mark a function with @hookimpl"),
        (gen.FakePoint("p", WrongArguments(), gen.FakeDist("bad")), "everything"),
        (
            gen.FakePoint("p", Misspelt(), gen.FakeDist("bad")),
            "unknown hook attn_register_pin: known: attn_register_backends, attn_register_libraries"
            ", attn_register_pins",
        ),
    ],
)
def test_a_broken_plugin_is_listed_and_the_others_live(point, message):
    registry = load_plugins([point, FINE])
    assert [s.name for s in registry.family("softmax")] == ["fine"]
    (broken,) = registry.broken
    assert message in broken.error
    assert broken.origin.distribution == "bad"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", None, "device None (expected text"),
        ("device", "", "device '' (expected text, a type or 'any'"),
        ("device", "cpu:amx", "device 'cpu:amx' (expected text, a type or 'any'; its archi"),
        ("dtypes", set(), "dtypes {} (expected a set of text, of bf16, fp16, fp32)"),
        ("dtypes", {"bfloat16"}, "dtypes {'bfloat16'} (expected"),
        ("kv_dtypes", {"fp8"}, "kv_dtypes {'fp8'} (expected"),
        ("archs", {90}, "archs {90} (expected a set of text)"),
        ("min_runtime", "abc", "min_runtime 'abc' (expected text or None, a version like 12.8)"),
        ("min_runtime", 12.8, "min_runtime 12.8 (expected"),
        ("requires", ["acme >=> 2"], "requires ('acme >=> 2',) (expected a list of text"),
        ("requires", [None], "requires (None,) (expected a list of text"),
        ("phases", {"prefill"}, "phases {'prefill'} (expected a set of Phase"),
        ("page_sizes", {0}, "page_sizes {0} (expected a set of int, above 0)"),
        ("page_sizes", {"16"}, "page_sizes {'16'} (expected a set of int"),
        ("max_page_size", 0, "max_page_size 0 (expected int or None, above 0)"),
        ("layouts", {"nhd"}, "layouts {'nhd'} (expected a set of text, of HND, NHD)"),
        ("head_dims", {64, "128"}, "head_dims {'128', 64} (expected a set of int"),
        ("head_dim_pairs", {64}, "head_dim_pairs {64} (expected a set of a pair of int or 'any'"),
        ("head_dim_pairs", {(64, 0)}, "head_dim_pairs {(64, 0)} (expected"),
        ("sinks", 1, "sinks 1 (expected True or False)"),
        ("max_verify_topk", None, "max_verify_topk None (expected int, 0 or more)"),
        ("max_verify_topk", True, "max_verify_topk True (expected int"),
        ("max_session_topk", -1, "max_session_topk -1 (expected int or None, 0 or more)"),
        ("priority", "30", "priority '30' (expected int)"),
        ("cuda_graph", "yes", "cuda_graph 'yes' (expected 'never', 'decode', 'uniform', 'always')"),
        ("with_linear_layers", "no", "with_linear_layers 'no' (expected True or False or None)"),
        ("bans", {"fa4": None}, "bans {'fa4': None} (expected a mapping of text to text)"),
        ("note", None, "note None (expected text)"),
    ],
)
def test_a_badly_typed_row_breaks_its_backend_alone(field, value, message):
    registry = load_plugins([gen.point("bad", [spec("bad", replace(ROW, **{field: value}))]), FINE])
    assert [s.name for s in registry.family("softmax")] == ["fine"]
    (broken,) = registry.broken
    assert (broken.name, message in broken.error) == ("bad", True), broken.error


def test_a_value_that_an_earlier_row_lacks_is_checked():
    """What rows share is checked once: a value, or a default that none of them changes."""
    for wrong, message in (({"lse": 1}, "lse 1"), ({"page_sizes": {0}}, "page_sizes {0}")):
        rows = [ROW, replace(ROW, note="b"), replace(ROW, **wrong), ROW]
        several = replace(spec("bad"), capabilities=rows)
        (broken,) = load_plugins([gen.point("bad", [several])]).broken
        assert f"row 2: {message} (expected" in broken.error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_sizes": {16}, "max_page_size": 8}, "max_page_size 8 (expected 16 or more, of page"),
        (
            {"page_sizes": {16}, "preferred_page_size": 24, "preferred_page_reason": "faster"},
            "preferred_page_size 24 (expected a size that the row takes: 16)",
        ),
        ({"preferred_page_size": 64}, "preferred_page_size 64 without preferred_page_reason"),
    ],
)
def test_a_page_size_that_no_pool_would_have_is_named(fields, message):
    registry = load_plugins([gen.point("bad", [spec("bad", replace(ROW, **fields))])])
    (broken,) = registry.broken
    assert message in broken.error


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(ROW, dtypes="bf16"), r"dtypes 'bf16' \(expected a set\)"),
        (lambda: replace(ROW, archs="sm90"), r"archs 'sm90' \(expected a set\)"),
        (lambda: replace(ROW, requires="acme"), r"requires 'acme' \(expected a list\)"),
        (lambda: replace(ROW, page_sizes=64), r"page_sizes 64 \(expected a set\)"),
        (lambda: replace(ROW, dtypes="any"), r"dtypes 'any' \(expected a set\)"),
        (lambda: replace(ROW, bans="fa4"), r"bans 'fa4' \(expected a mapping\)"),
        (lambda: spec(aliases="acme"), r"aliases 'acme' \(expected a list\)"),
    ],
)
def test_text_is_no_collection(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_every_field_of_a_row_is_checked():
    """A field of a new type is not passed over: no object() is fine anywhere."""
    for record in (ROW, spec(), Pin(distribution="a", torch="", version="", why="")):
        for f in fields(record):
            wrong = copy.copy(record)
            object.__setattr__(wrong, f.name, object())
            assert declared._fields(wrong).startswith(f"{f.name} <object"), f.name
            assert declared._fields(record) is None


def test_a_plugin_cannot_write_to_the_commands_output(capsys):
    class Loud(gen.FakePoint):
        def load(self):
            print("welcome to acme")
            return super().load()

    load_plugins([Loud("acme", gen.plugin([spec()]), gen.FakeDist("acme"))])
    assert capsys.readouterr() == ("", "welcome to acme\n")


def test_ctrl_c_is_nobodys_fault():
    with pytest.raises(KeyboardInterrupt):
        load_plugins([gen.FakePoint("p", KeyboardInterrupt(), gen.FakeDist("a"))])


@pytest.mark.parametrize(
    "project", ["packages/attn-" + n for n in ("nvidia", "rocm", "ascend", "intel")] + [ACME]
)
def test_our_plugins_pin_the_contract(project):
    data = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    dist = gen.FakeDist(data["name"], requires=data["dependencies"])
    registry = load_plugins([gen.FakePoint("p", gen.plugin([spec()]), dist)])
    assert not registry.broken
    major, minor, _ = attn_core.__version__.split(".")
    assert f"attn-core=={major}.{minor}.*" in data["dependencies"]


def test_a_distribution_that_lost_its_metadata_is_no_fault_of_the_plugin():
    lost = gen.FakeDist(None, requires=None)
    assert not load_plugins([gen.FakePoint("p", gen.plugin([spec()]), lost)]).broken


def test_extras_of_another_contract_do_not_count():
    needs = ('attn-core>=9; extra == "future"', "attn-core==0.1.*")
    registry = load_plugins([gen.point("a", [spec()], requires=needs)])
    assert not registry.broken


def test_a_builtin_wins_a_name_then_the_alphabetically_first_distribution():
    points = [
        gen.point("zeta", [spec("x"), spec("z")]),
        gen.point("acme", [spec("x"), spec("y")]),
        gen.point("attn-core", [spec("y")]),
    ]
    for order in (points, points[::-1]):
        registry = load_plugins(order)
        origins = {
            s.name: registry.origins["softmax", s.name].distribution
            for s in registry.family("softmax")
        }
        assert origins == {"x": "acme", "y": "attn-core", "z": "zeta"}
        broken = {(b.name, b.origin.distribution): b.error for b in registry.broken}
        assert set(broken) == {("y", "acme"), ("x", "zeta")}
        assert broken["y", "acme"] == "the name 'y' is taken by attn-core 1.0; rename this one"


def test_names_are_unique_within_a_family_only():
    registry = load_plugins([gen.point("a", [spec("triton"), spec("triton", GDN)])])
    assert not registry.broken
    assert registry.get("triton").family == "softmax"
    assert registry.get("triton", "linear").family == "linear"


def test_asking_for_a_broken_backend_says_that_it_is_broken():
    registry = load_plugins([gen.FakePoint("acme", ImportError("no libacme"), gen.FakeDist("a"))])
    with pytest.raises(UnknownBackendError, match=r"broken in a 1\.0: ImportError: no libacme"):
        registry.get("acme")


def test_aliases_and_pins_are_taken_in():
    pin = Pin(distribution="acme", torch="==2.11.*", version="==2.0", why="one ABI")
    plugin = gen.plugin([spec(aliases=("acme_attn",))])
    plugin.attn_register_pins = hookimpl(lambda: [pin])
    plugin.attn_register_pins.__name__ = "attn_register_pins"
    registry = load_plugins([gen.FakePoint("p", plugin, gen.FakeDist("a"))])
    assert registry.get("acme_attn").name == "fine"
    assert registry.pins == (pin,)
    assert pin.pip == "pip install 'acme==2.0'"


@pytest.mark.parametrize(
    ("returned", "libraries", "error"),
    [
        (["acme-kernels"], {"acme-kernels": None}, ""),
        (["Acme_Kernels==2.0"], {"acme-kernels": "2.0"}, ""),
        (["acme>=2"], {}, "not NAME or NAME==VERSION"),
        ("acme", {}, "returned str, not a list"),
    ],
)
def test_a_plugin_says_which_libraries_of_its_own_are_here(returned, libraries, error):
    plugin = gen.plugin([spec()])
    plugin.attn_register_libraries = hookimpl(lambda: returned)
    plugin.attn_register_libraries.__name__ = "attn_register_libraries"
    registry = load_plugins([gen.FakePoint("p", plugin, gen.FakeDist("a"))])
    assert registry.installed_libraries() == libraries | {"torch": torch_build()["version"]}
    assert bool(registry.broken) == bool(error)
    assert all(error in b.error for b in registry.broken)


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (spec("x"), spec("y", aliases=["x"]), "the alias 'x' is taken by a 1.0; rename this one"),
        (spec("y", aliases=["x"]), spec("x"), "the name 'x' is taken by a 1.0; rename this one"),
        (spec("y", aliases=["x"]), spec("z", aliases=["w", "x"]), "the alias 'x' is taken by"),
    ],
)
def test_aliases_are_names_that_others_cannot_take(first, second, error):
    registry = load_plugins([gen.point("b", [second]), gen.point("a", [first])])
    assert registry.family("softmax") == (first,)
    (broken,) = registry.broken
    assert error in broken.error
    other = spec("triton", GDN, aliases=["x"])  # of the other family
    assert not load_plugins([gen.point("a", [first, other])]).broken


def test_a_name_goes_before_an_alias_and_either_family_is_found():
    hijack = spec("a", aliases=["x"])
    key = ("softmax", "x")
    registry = Registry({("softmax", "a"): hijack, key: spec("x"), ("linear", "g"): spec("g", GDN)})
    assert registry.get("x").name == "x"
    assert registry.find("g").name == "g"
    registry = load_plugins(
        [gen.point("d", [spec("fine", aliases=["acme_attn"]), spec("gated", GDN, aliases=["gdn"])])]
    )
    assert [registry.find(n).name for n in ("fine", "acme_attn", "gdn")] == ["fine"] * 2 + ["gated"]
    with pytest.raises(UnknownBackendError, match=r"unknown backend 'acme_atn': .*acme_attn"):
        registry.get("acme_atn")
    with pytest.raises(UnknownBackendError, match=r"unknown backend 'gatd': .*gated"):
        registry.find("gatd")


def test_the_installed_packages_load_without_a_fault():
    registry = load_plugins()
    assert registry.broken == ()
    assert registry.get("torch_native").implemented


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk": 0}, "topk 0 .expected 1 or more"),
        ({"topk": 2.5}, "topk 2.5"),
        ({"num_draft_tokens": -1}, "num_draft_tokens -1"),
        ({"mode": "verify"}, "mode 'verify' .expected prefill or decode"),
    ],
)
def test_speculation_that_cannot_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Speculation(**fields)
