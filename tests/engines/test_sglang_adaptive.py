"""Passes of SGLang go to the backend that was measured fastest for their size."""

import json
from dataclasses import replace

import pytest
import torch
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.integrations import choice
from attn_core.integrations.sglang import selection
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.plugins.registry import Registry
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import probe_cpu
from engine_passes import Pass as EnginePass
from engine_passes import attention, error, mha_pool, runner, swa_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

PAGE = 16
ROW = Capabilities(
    kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=1, lse=True,
    max_verify_topk=1, needs_host_lengths=True, sliding_window=True,
)  # fmt: skip
FORM = Form(q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, page_size=PAGE, dtype="fp32",
            store="fp32")  # fmt: skip
SIZES = [Pass.even("decode", b, n) for b in (1, 8) for n in (8, 64, 128)]
SIZES += [Pass.even("prefill", b, n, q) for b in (1, 4) for n in (8, 64, 128) for q in (1, 8, n)]


def us(name, x):
    return 1.0 + x.kv_tokens / 10 if name == "quick" else 10.0 + x.kv_tokens / 100


def by_group(name, x):
    """`quick` is fast in layers with a window, `steady` in those without."""
    return lambda form: 10.0 if (name == "quick") == (form.window is not None) else 100.0


@pytest.fixture(params=[((FORM,), lambda name, x: lambda form: us(name, x))])
def measured(tmp_path, monkeypatch, request):
    forms, time = request.param
    specs = [
        BackendSpec(name=n, capabilities=[ROW],
                    create="attn_core.backends.torch_native.backend:TorchNative")
        for n in ("quick", "steady")
    ]  # fmt: skip
    registry = Registry(backends={("softmax", s.name): s for s in specs})
    costs = {
        Key(s.name, "", form, x): Cost(*[time(s.name, x)(form)] * 3, 0.0, 5.0)
        for s in specs
        for x in SIZES
        for form in forms
    }
    env = environment(registry, probe_cpu())
    store.write(tmp_path / "tuned.json", Profile(environment=env, costs=costs, date="2026-11-25"))
    monkeypatch.setattr(choice, "load_plugins", lambda: registry)
    monkeypatch.setenv("ATTN_PROFILE", str(tmp_path / "tuned.json"))
    workload = {"prompts": {"64": 1}, "requests": {"8": 1}, "output": 16}
    monkeypatch.setenv("ATTN_WORKLOAD", json.dumps(workload))


def build(**args):
    torch.manual_seed(0)
    module = attention()
    run = runner([module], mha_pool(page=PAGE), PAGE, **args)
    return run, module, AttnCoreBackend(run)


def grown(backend, run, made, module):
    """Run a pass, compare it with a dense softmax, and return which backends ran one."""
    before = dict(backend.dispatcher.passes)
    assert error(backend, run, made, module) < 1e-5
    after = backend.dispatcher.passes
    return {(k.role, k.backend) for k, n in after.items() if n != before.get(k, 0)}


def decode(rows, prefix):
    return EnginePass(ForwardMode.DECODE, rows, prefix, (1,) * len(rows))


EIGHT = (1, 2, 3, 4, 5, 6, 7, 8)


def test_decode_and_prefill_take_other_backends_for_other_sizes(measured):
    run, module, backend = build()
    assert grown(backend, run, decode((3,), (9,)), module) == {("decode", "quick")}
    assert grown(backend, run, decode(EIGHT, (99,) * 8), module) == {("decode", "steady")}
    prompts = EnginePass(ForwardMode.EXTEND, (3, 1, 7, 5), (60,) * 4, (65,) * 4)
    assert grown(backend, run, prompts, module) == {("prefill", "steady")}
    short = EnginePass(ForwardMode.EXTEND, (3,), (0,), (9,))
    assert grown(backend, run, short, module) == {("prefill", "quick")}


WINDOWED = replace(FORM, window=8)


@pytest.mark.parametrize("measured", [((FORM, WINDOWED), by_group)], indirect=True)
def test_layers_with_a_window_take_another_backend_of_the_same_pass(measured):
    torch.manual_seed(0)
    window, plain = attention(0, sliding_window_size=7), attention(1)
    run = runner([window, plain], swa_pool(page=PAGE), PAGE)
    backend = AttnCoreBackend(run)
    prompt = EnginePass(ForwardMode.EXTEND, (3, 1), (20, 0), (9, 9))
    for made in (decode((3, 5), (9, 70)), prompt):
        assert error(backend, run, made, window, window=8) < 1e-5
        assert error(backend, run, made, plain) < 1e-5
    assert {(k.role, k.backend, k.group) for k in backend.dispatcher.passes} == {
        (role, name, form.layer)
        for role in ("decode", "prefill")
        for name, form in (("quick", WINDOWED), ("steady", FORM))
    }


def test_a_variable_turns_it_off(measured, monkeypatch):
    monkeypatch.setenv("ATTN_ADAPTIVE", "0")
    run, module, backend = build()
    own = backend.selection.backend("decode")
    for made in (decode((3,), (9,)), decode(EIGHT, (99,) * 8)):
        assert grown(backend, run, made, module) == {("decode", own)}
    assert not backend.dispatcher.pickers.items()


def test_the_log_and_the_server_say_who_takes_passes(measured, caplog):
    with caplog.at_level("INFO", "attn_core"):
        run, _module, _backend = build()
    said = "\n".join(r.getMessage() for r in caplog.records)
    assert "passes are picked by what was measured" in said
    assert run.server_args.attn_core["decode by pass"] == "quick"


def test_a_draft_model_keeps_its_backends(measured):
    speculation = {
        "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "speculative_draft_attention_backend": "attn_core",
    }  # fmt: skip
    _run, _module, backend = build(draft=True, **speculation)
    assert not backend.selection.alternatives
    assert not backend.dispatcher.pickers.items()


@pytest.mark.parametrize(("metrics", "rank", "labels"), [
    (True, 0, ["model"]), (False, 0, []), (True, 1, []),
])  # fmt: skip
def test_passes_are_exported_where_the_server_has_metrics(
    measured, monkeypatch, metrics, rank, labels
):
    exported = []
    monkeypatch.setattr(selection, "export", lambda dispatcher, name: exported.append(name))
    run = runner([attention()], mha_pool(page=PAGE), PAGE, enable_metrics=metrics)
    run.ps = type("Ranks", (), {"attn_tp_rank": rank})
    AttnCoreBackend(run)
    assert exported == labels
