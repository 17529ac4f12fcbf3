"""A warm-up runs the linear layers of a hybrid model in every mode, over no state."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from attn_core import (
    BackendRunError,
    HybridDispatcher,
    LayerRequirements,
    Requirements,
    Speculation,
    UsageError,
    load_plugins,
    select,
)
from attn_core.cli.app import build_app
from attn_core.runtime.warmup import create, warmup
from attn_core.spec.device import probe_device
from linear_passes import GDN, KDA, M, gate, inputs, make_batch, speculation
from linear_serving import DRAFTS, Recording, caches, forward, linear
from recording import CONFIG, LAYERS, Recorder
from typer.testing import CliRunner

SOFTMAX = LayerRequirements(head_dim=32, num_q_heads=4, num_kv_heads=2)
PASSES = [
    "linear prefill, batch size 2",
    "linear prefill with checkpoints, batch size 2",
    "linear prefill, batch size 3",
    "linear prefill with checkpoints, batch size 3",
    "linear prefill, batch size 5",
    "linear prefill with checkpoints, batch size 5",
    "linear decode, batch size 1",
    "linear decode, batch size 5",
    f"linear verify and commit, {DRAFTS} drafts",
]


def hybrid(**changes):
    """Return a dispatcher that verifies as many drafts in both families, and its linear routes."""
    routes = linear(**changes)
    softmax = Recorder(dataclasses.replace(CONFIG, num_draft_tokens=DRAFTS, layers=LAYERS[:1]))
    roles = (
        "prefill",
        "decode",
        *(("verify", "draft") if "linear_verify" in routes.routes else ()),
    )
    return HybridDispatcher(dict.fromkeys(roles, softmax), caches(), routes), routes


def linear_part(warmed):
    return [x.what for x in warmed if x.what.startswith("linear")]


class Noting(Recording):
    """Notes the method, the layer and the batch of each call."""

    def __init__(self, settings):
        super().__init__(settings)
        self.calls = []

    def extend(self, *args, **kwargs):
        self.calls.append(("extend", args[5], args[7]))
        return super().extend(*args, **kwargs)

    def decode(self, *args, **kwargs):
        self.calls.append(("decode", args[5], args[7]))
        return super().decode(*args, **kwargs)

    def verify(self, *args, **kwargs):
        self.calls.append(("verify", args[5], args[7]))
        return super().verify(*args, **kwargs)

    def commit(self, pool, batch, metadata, accepted):
        self.calls.append(("commit", None, batch))
        return super().commit(pool, batch, metadata, accepted)


@pytest.mark.parametrize("layer", [GDN, KDA], ids=lambda x: x.kind)
def test_each_mode_runs_with_fresh_requests_and_without_them(layer):
    dispatcher, routes = hybrid(layer=layer, backend=Noting)
    before = routes.states.states.map(torch.clone)
    warmed = warmup(dispatcher, max_bs=5)
    assert linear_part(warmed) == PASSES
    prefill, decode = routes.routes["linear_prefill"], routes.routes["linear_decode"]
    assert {x.backend for x in warmed if x.what.startswith("linear decode")} == {"decoder"}

    def seen(backend):
        return [
            (name, x.state_fresh is not None, x.checkpoint_slots is not None)
            for name, _, x in backend.calls
        ]

    extends = [("extend", fresh, saved) for saved in (False, True) for fresh in (False, True)]
    drafts = [(name, fresh, False) for fresh in (False, True) for name in ("verify", "commit")]
    assert seen(prefill) == extends * 3 + drafts
    assert seen(decode) == [("decode", fresh, False) for fresh in (False, True)] * 2
    assert [x.batch_size for _, _, x in decode.calls] == [1, 1, 5, 5]
    assert all((x.state_slots == -1).all() for b in (prefill, decode) for _, _, x in b.calls)
    after = routes.states.states
    for name in ("state", "u", "k", "g"):
        assert torch.equal(getattr(after, name), getattr(before, name)), name


def test_a_row_without_checkpoints_or_drafts():
    dispatcher, _ = hybrid(checkpoints=False, verify=False)
    assert linear_part(warmup(dispatcher, max_bs=5)) == [*PASSES[0:6:2], *PASSES[6:8]]


def created(layer=GDN.requirements, **needs):
    registry = load_plugins()
    needs = Requirements(layers=(SOFTMAX, layer), dtype="fp32", **needs)
    selection = select(needs, probe_device(), registry, registry.installed_libraries())
    return create(selection, needs, registry, torch.device("cpu"), max_bs=5)


def test_both_forms_of_a_gate_run():
    """A backend has kernels for gates that it computes and for those that the engine computes."""
    dispatcher = created(speculation=Speculation(topk=2, num_draft_tokens=DRAFTS))
    layers = dispatcher.linear.routes["linear_decode"].config.linear_layers
    assert [(x.gate is None, x.qk_norm) for x in layers] == [(False, 1e-6), (True, 1e-6)]
    assert dispatcher.linear.states.num_drafts == DRAFTS
    ran = []

    def noted(method, own, *args, **kwargs):
        ran.append((method, args[5].gate is None))
        return own(*args, **kwargs)

    for role, backend in dispatcher.linear.routes.items():
        method = role.removeprefix("linear_").replace("prefill", "extend")

        setattr(backend, method, partial(noted, method, getattr(backend, method)))
    assert linear_part(warmup(dispatcher, max_bs=5)) == PASSES
    methods = ("extend", "decode", "verify")
    assert set(ran) == {(method, plain) for method in methods for plain in (False, True)}


def test_unknown_shapes_are_refused():
    with pytest.raises(UsageError, match="linear layers of head_dim None, 2 key heads: a warm-up"):
        created(dataclasses.replace(GDN.requirements, head_dim=None, v_head_dim=None))


def test_a_failure_names_backend_and_pass():
    dispatcher, routes = hybrid()
    routes.routes["linear_decode"].decode = lambda *_, **__: 1 / 0
    with pytest.raises(BackendRunError, match=r"decoder failed in .*, layer 0, a decode pass of b"):
        warmup(dispatcher)


def test_no_kernel_is_compiled_after_a_warmup():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter's test")
    from attn_core.backends.triton.linear.backend import TritonLinear

    layer = dataclasses.replace(GDN, head_v_dim=32, qk_norm=1e-6)
    layer = dataclasses.replace(layer, gate=gate(layer))
    dispatcher, routes = hybrid(layer=layer, backend=TritonLinear)
    backends = set(routes.routes.values())

    def kernels():
        kept = [b._arguments(layer) for b in backends]
        return {key for x in kept for key in (*x.launchers, *x.prefills)}

    warmup(dispatcher)
    before = kernels()
    names = {key[0] for key in before}
    assert names == {"prefill", "decode", "verify", "commit"}
    fresh = {"state_fresh": torch.tensor([True, False])}
    for more in ({}, fresh):
        forward(dispatcher, make_batch(M.EXTEND, [70, 3], (1, 2), **more), inputs(layer, 73), layer)
        forward(dispatcher, make_batch(M.DECODE, [1, 1], (1, 2), **more), inputs(layer, 2), layer)
        drafts = {"spec": speculation(DRAFTS), **more}
        batch = make_batch(M.TARGET_VERIFY, [DRAFTS] * 2, (1, 2), **drafts)
        _, metadata = forward(dispatcher, batch, inputs(layer, 2 * DRAFTS), layer)
        dispatcher.commit(batch, metadata, torch.tensor([1, 0], dtype=torch.int32))
    assert kernels() == before


HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def attn(folder, *arguments, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(HYBRID | changes))
    return CliRunner().invoke(build_app("warmup"), ["warmup", str(path), *arguments])


def test_the_command_warms_a_hybrid_model_up(tmp_path):
    done = attn(tmp_path, "--attention-backend", "torch_native", "--max-bs", "5", "--json")
    assert done.exit_code == 0, done.exception
    found = [x["what"] for x in json.loads(done.output)["passes"] if "linear" in x["what"]]
    assert found == PASSES[:8]


def test_states_that_would_take_the_machine_down_are_refused(tmp_path):
    wide = {"linear_key_head_dim": 1 << 18, "linear_value_head_dim": 1 << 18}
    error = attn(tmp_path, **wide).exception
    assert isinstance(error, UsageError)
    assert "a warm-up of 4 value heads, head_dim 262144, 0 drafts and --max-bs 1" in str(error)
