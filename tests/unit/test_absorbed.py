"""A row of MLA without absorbed attention: it prefills ragged alone, and says so."""

import pytest
import torch
from attn_core.errors import UnsupportedError
from attn_core.plugins.registry import Registry
from attn_core.plugins.validation import problem
from attn_core.selection.result import NoBackendError, notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import parse_device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.plan import plan
from attn_core.testing.runner import Outcome, problems, report
from recording import LAYERS, M, batch, make, qkv, recorder

PREFILL = frozenset({Phase.PREFILL})


def row(**changes):
    base = {
        "kind": "mla",
        "device": "any",
        "dtypes": {"bf16"},
        "kv_dtypes": {"bf16"},
        "priority": 20,
        "head_dim_pairs": {(576, 512)},
        "chunked_prefix": True,
        "lse": True,
    }
    return Capabilities(**base | changes)


RAGGED = {"phases": PREFILL, "absorbed": False}
RAGGED_ROW = row(**RAGGED)


def spec(name, *rows):
    return BackendSpec(name=name, capabilities=rows, create="no:Class")


def registry(*specs):
    return Registry({("softmax", s.name): s for s in specs}, {}, {})


def choose(*specs, **more):
    overrides = more.pop("overrides", None)
    layer = LayerRequirements(kind="mla", head_dim=576, v_head_dim=512)
    needs = Requirements(layers=(layer,), **more)
    return select(needs, parse_device("cpu"), registry(*specs), {}, overrides)


def test_the_selection_tells_that_prefill_runs_ragged():
    selection = choose(spec("wide", row(**RAGGED, priority=30)), spec("latent", row()))
    assert (selection.backend("prefill"), selection.backend("decode")) == ("wide", "latent")
    said = "wide prefills MLA without its cache: write new latents with write_kv"
    assert said in notes_of(selection)
    assert said in selection.explain()
    alone = choose(spec("latent", row()))
    assert not notes_of(alone)


def test_it_neither_decodes_nor_verifies():
    named = Overrides(attention_backend="wide")
    with pytest.raises(NoBackendError, match=r"phase decode \(supports prefill\)"):
        choose(spec("wide", RAGGED_ROW), spec("latent", row()), overrides=named)
    both = spec("wide", row(**RAGGED, priority=30)), spec("latent", row(max_verify_topk=1))
    chosen = choose(*both, speculation=Speculation(mode="decode"))
    assert (chosen.backend("prefill"), chosen.backend("verify")) == ("wide", "latent")
    chosen = choose(*both, speculation=Speculation(mode="prefill"))
    assert chosen.backend("prefill") == "latent"


@pytest.mark.parametrize("mode", [M.EXTEND, M.MIXED, M.DECODE, M.DRAFT_EXTEND])
def test_a_pass_over_the_cache_is_refused_before_it_is_written(mode):
    ragged = recorder("wide", absorbed=False)
    dispatcher, _, _ = make(prefill=ragged, decode=ragged)
    b = batch(mode)
    q, k, v = qkv(b.num_tokens)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"{mode.value}: .* row of wide has no absorbed"):
            dispatcher.forward(q, k, v, LAYERS[0], b, None)
    assert not ragged.calls
    assert not dispatcher.caches.layer(0).k.any()


def test_attention_without_a_cache_runs():
    dispatcher, ragged, _ = make(prefill=recorder("wide", absorbed=False))
    dispatcher.init_forward_metadata(batch(M.EXTEND))  # every pass is planned
    cu = torch.tensor([0, 4], dtype=torch.int32)
    dispatcher.forward_ragged(*qkv(4), LAYERS[0], cu, cu, 4, 4, causal=True)
    assert [name for name, *_ in ragged.calls] == ["init_forward_metadata", "forward_ragged"]


@pytest.mark.parametrize(
    "changes", [{"absorbed": False}, {**RAGGED, "max_verify_topk": 1}, {"absorbed": "no"}]
)
def test_a_declaration_that_contradicts_itself_is_refused(changes):
    assert "absorbed" in problem(spec("wide", row(**changes)))
    assert problem(spec("wide", RAGGED_ROW)) is None


def test_the_suite_asks_such_a_row_without_a_cache_alone():
    device, wide = parse_device("cpu"), spec("wide", RAGGED_ROW)
    checks = plan(wide, device, {}, kinds=("mla",), passes=3)
    requested = {p.check.feature for p in checks if p.row is not None}
    assert {"mla-ragged", "mla-ragged-prefix", "prefix-in-chunks"} < requested
    assert all("ragged" in feature for feature in requested - {"prefix-in-chunks"})
    said = [p.reason for p in checks if p.check.feature == "mla-prefill"]
    assert said
    assert set(said) == {"a pass over the latent cache (absorbed: not supported)"}
    passed = [
        Outcome(planned=p, status="passed" if p.row else "skipped", detail=p.reason) for p in checks
    ]
    result = report(passed, wide, device, {})
    assert not problems(result), "what the row declares is asked, and nothing else"
    assert result["mla"]["lse"].cases
