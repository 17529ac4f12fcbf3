"""A broken plugin is listed with its error and its distribution and takes nothing else down."""

from __future__ import annotations

import pytest
import strategies as gen
from attn_core.capabilities import BackendSpec, Capabilities
from attn_core.errors import UnknownBackendError
from attn_core.hookspecs import hookimpl
from attn_core.libraries import Pin
from attn_core.plugins import load_plugins

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
        (gen.point("bad", [spec(name="")]), "name '' is no text"),
        (gen.point("bad", [spec(name="bad", row="row")]), "a row is a str, not Capabilities"),
        (
            gen.point("bad", [BackendSpec(name="b", capabilities=[], create="a:b")]),
            "no rows: a backend declares at least one Capabilities",
        ),
        (
            gen.point("bad", [BackendSpec(name="b", capabilities=[ROW], create="nowhere")]),
            "create 'nowhere' is not 'module:Class'",
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
            "kind 'mhla' (did you mean mla or mha?)",
        ),
        (
            gen.point("bad", [spec()], requires=("attn-core>=0.2",)),
            "requires attn-core>=0.2, 0.1.0 is installed",
        ),
        (gen.FakePoint("p", NoHook(), gen.FakeDist("bad")), "mark a function with @hookimpl"),
        (gen.FakePoint("p", WrongArguments(), gen.FakeDist("bad")), "everything"),
    ],
)
def test_a_broken_plugin_is_listed_and_the_others_live(point, message):
    registry = load_plugins([point, FINE])
    assert [s.name for s in registry.family("softmax")] == ["fine"]
    (broken,) = registry.broken
    assert message in broken.error
    assert broken.origin.distribution == "bad"


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


def test_the_installed_packages_load_without_a_fault():
    registry = load_plugins()
    assert registry.broken == ()
    assert registry.get("torch_native").implemented
