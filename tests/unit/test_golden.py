"""Every rule of the documented selection guide, and of ours, is one entry of golden.toml."""

import tomllib
from pathlib import Path

import pytest
from attn_core.cache.page_table import reusable_prefix
from attn_core.errors import AttnError
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import load_plugins
from attn_core.selection.result import notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.device import parse_device
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests/data/golden.toml").read_text())
RULES = TABLE["rule"]
FIELDS = {"page", "rule", "departs", "model", "change", "vision", "device", "runtime", "page_size"}
FIELDS |= {
    "kv",
    "topk",
    "mode",
    "deterministic",
    "lacking",
    "flags",
    "here",
    "expect",
    "refused",
    "reuse",
    "tested_by",
}


@pytest.fixture(scope="module")
def registry():
    found = load_plugins()
    assert not found.broken
    return found


def layer(fields):
    chunks = fields.get("dual_chunk")
    return LayerRequirements(**fields | {"dual_chunk": chunks and DualChunk(**chunks)})


def ask(rule, registry):
    """Run select() on what an entry asks."""
    layers = [layer(x | rule.get("change", {})) for x in TABLE["models"][rule["model"]]]
    vision = TABLE["vision"].get(rule.get("vision"))
    topk = rule.get("topk")
    needs = Requirements(
        layers=tuple(layers),
        vision=LayerRequirements(**vision) if vision else None,
        kv_cache_dtype=rule.get("kv", "auto"),
        page_size=rule.get("page_size"),
        speculation=Speculation(topk=topk, mode=rule.get("mode", "prefill")) if topk else None,
        deterministic=rule.get("deterministic", False),
    )
    here = rule.get("here", False)
    everything = {
        canonicalize_name(w.name): None
        for group in registry.requires()
        for w in alternatives(group)
        if not here and w.name not in rule.get("lacking", ())
    }
    flags = {k: tuple(v) if isinstance(v, list) else v for k, v in rule.get("flags", {}).items()}
    return select(
        needs,
        parse_device(rule["device"], rule.get("runtime")),
        registry,
        everything,
        Overrides(**flags),
        simulated=not here,
    )


POOL = {"page_size", "kv_cache_dtype", "layout"}
ROLE_OF = {"multimodal": "encode", "linear": "linear_prefill"}


def check(selection, expect):
    for key, want in expect.items():
        notes = notes_of(selection)
        if key == "note":
            assert want in notes
        elif key == "no_note":
            assert want not in notes
        elif key == "why":
            assert want in selection.page_size_reason
        elif key in ("assumption", "advice"):
            texts = selection.assumptions if key == "assumption" else selection.advice
            assert any(want in text for text in texts)
        elif key == "kernels":
            assert want == [selection.roles[r].row.sub_backend for r in ("prefill", "decode")]
        elif key == "linear" and want:
            assert want == {role: selection.backend(f"linear_{role}") for role in want}
        else:
            found = (
                getattr(selection, key) if key in POOL else selection.backend(ROLE_OF.get(key, key))
            )
            assert found == (want or None), key


@pytest.mark.parametrize("rule", RULES, ids=[f"{i:03}-{r['page']}" for i, r in enumerate(RULES)])
def test_rule(rule, registry):
    assert set(rule) <= FIELDS, "a key of the entry that nothing reads"
    assert len({"expect", "refused", "reuse", "tested_by"} & set(rule)) == 1
    if "tested_by" in rule:
        return  # what it names is held by test_a_test_that_a_rule_names_is_collected
    if "reuse" in rule:
        tokens, page_size, reused = rule["reuse"]
        assert reusable_prefix(tokens, page_size) == reused
        return
    rule = {"model": "llama"} | rule
    if "refused" in rule:
        with pytest.raises(AttnError) as refusal:
            ask(rule, registry)
        assert rule["refused"] in str(refusal.value)
    else:
        selection = ask(rule, registry)
        check(selection, rule["expect"])
        assert selection.explain()


def test_a_test_that_a_rule_names_is_collected():
    """pytest refuses a file that is not there, and a name in it that is no test."""
    named = sorted({rule["tested_by"] for rule in RULES if "tested_by" in rule})
    assert named
    collect = ("--collect-only", "-p", "no:cacheprovider", *(str(ROOT / test) for test in named))
    assert pytest.main([*collect]) == pytest.ExitCode.OK


def test_the_table_names_every_backend(registry):
    """No backend is declared without a rule that chooses it."""
    roles = ("prefill", "decode", "multimodal")
    expected = [r["expect"] for r in RULES if "expect" in r]
    softmax = {e[role] for e in expected for role in roles if role in e}
    linear = {v for e in expected if e.get("linear") for v in e["linear"].values()}
    assert softmax == {spec.name for spec in registry.family("softmax")}
    assert linear == {spec.name for spec in registry.family("linear")}


def test_no_rule_stands_twice():
    keys = [str(sorted((k, v) for k, v in r.items() if k not in ("departs",))) for r in RULES]
    assert len(keys) == len(set(keys))
