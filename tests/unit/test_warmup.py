"""A warm-up runs every kind of pass that serving will run, over page 0 alone."""

import json
from dataclasses import replace

import pytest
import torch
from attn_core.backends.triton.tuning import hopper_launch
from attn_core.cli.app import build_app
from attn_core.errors import BackendRunError, UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import DECODE_MODES
from attn_core.runtime.warmup import create, warmup
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import probe_device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from recording import LAYERS, M, make, recorder
from typer.testing import CliRunner

CPU = torch.device("cpu")
MHA = LayerRequirements(head_dim=32, num_q_heads=4, num_kv_heads=2)
LATENT = LayerRequirements(kind="mla", head_dim=576, v_head_dim=512, num_q_heads=4)


def made(*layers, name="torch_native", **needs):
    registry = load_plugins()
    needs = Requirements(layers=layers, dtype="fp32", **needs)
    overrides = Overrides(attention_backend=name)
    libraries = registry.installed_libraries()
    selection = select(needs, probe_device(), registry, libraries, overrides)
    return create(selection, needs, registry, CPU, max_bs=3)


def modes(backend):
    return [args[0].forward_mode for name, args, _ in backend.calls if name.startswith("init")]


def thrice(*items):
    """Return each item once for each length."""
    return [item for item in items for _ in range(3)]


def test_each_mode_runs_on_its_backend_and_each_class_of_layers_once():
    dispatcher, pre, dec = make("decode", encode=recorder("tower", layers=()))
    said = []
    warmed = warmup(dispatcher, max_bs=5, step=lambda *what: said.append(what))
    assert modes(pre) == thrice(M.EXTEND, M.EXTEND, M.MIXED)
    drafts = (M.TARGET_VERIFY, M.DRAFT_DECODE, M.DRAFT_EXTEND)
    assert modes(dec) == thrice(*[M.DECODE] * 4, *drafts)
    assert {m for m in M if m is not M.IDLE} == {*modes(pre), *modes(dec)}
    for backend in (pre, dec):
        ran = [args for name, args, _ in backend.calls if name.startswith("forward")]
        assert [args[3] for args in ran] == [*LAYERS] * len(modes(backend))
        for args in ran:
            batch = args[5]
            decodes = batch.forward_mode in DECODE_MODES
            assert decodes == (batch.max_q_len == 1 and batch.batch_size == batch.num_tokens)
    sizes = [args[0].batch_size for name, args, _ in dec.calls if name.startswith("init")]
    assert sizes[:12] == thrice(1, 2, 4, 5)
    assert [(w.backend, w.what, len(warmed)) for w in warmed] == said
    assert all(w.seconds >= 0 for w in warmed)


@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_of_all_lengths_that_take_other_kernels_run(dim):
    dispatcher, pre, _ = make("decode", encode=recorder("tower", layers=()))
    warmup(dispatcher)
    batches = [args[0] for name, args, _ in pre.calls if name.startswith("init")]
    longest = {batch.views["full"].max_seq_len for batch in batches if batch.max_q_len > 64}

    def tiles(lengths):
        return {hopper_launch(dim, n, tiles=9, processors=132) for n in lengths}

    assert tiles(longest) == tiles(range(1, 5000))


def test_only_page_0_is_written():
    dispatcher = made(MHA)
    cache = dispatcher.caches.layer(0)
    cache.k.fill_(7.0)
    warmup(dispatcher)
    assert (cache.k[1:] == 7.0).all()
    assert not (cache.k[0] == 7.0).all()


@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_are_verified_where_speculation_is_on(topk):
    speculation = Speculation(topk=topk, num_draft_tokens=3)
    passes = [w.what for w in warmup(made(MHA, speculation=speculation))]
    assert passes[-3:] == ["verify, 3 drafts", "draft decode", "draft extend"]
    assert "draft extend" not in [w.what for w in warmup(made(MHA))]


def test_attention_without_a_cache():
    assert [w.what for w in warmup(made(LATENT))][-2:] == ["ragged prefill", "chunk of a prefix"]
    encoder = LayerRequirements(head_dim=32, num_q_heads=4, num_kv_heads=4, encoder=True)
    whole = made(MHA, encoder, vision=encoder)
    assert [w.what for w in warmup(whole)][-2:] == ["encoder", "vision"]
    assert [w.what for w in warmup(made(encoder))] == ["encoder"]


def test_every_kind_of_layer_runs():
    window = LayerRequirements(
        head_dim=32, num_q_heads=4, num_kv_heads=2, sliding_window=9, sinks=True
    )
    cap = LayerRequirements(head_dim=32, num_q_heads=4, num_kv_heads=2, logit_cap=3.0)
    cross = LayerRequirements(head_dim=32, num_q_heads=4, num_kv_heads=4, cross=True)
    dispatcher = made(MHA, window, cap, cross)
    assert len(dispatcher.routes["prefill"].config.layers) == 4
    assert len(warmup(dispatcher)) == 4


INDEXER = {"index_topk": 64, "index_heads": 2, "index_dim": 16}
SPARSE = LayerRequirements(kind="dsa", head_dim=48, v_head_dim=32, num_q_heads=4, **INDEXER)


def test_sparse_layers_select_in_every_pass_that_does_not_attend_to_all_keys():
    sharing = replace(SPARSE, index_heads=None, index_dim=None, shares_topk=True)
    dispatcher = made(SPARSE, sharing, speculation=Speculation(num_draft_tokens=3))
    assert [dispatcher.caches.layer(i).index is None for i in (0, 1)] == [False, True]
    selected = []
    for backend in {*dispatcher.routes.values()}:

        def index_topk(q, w, layer, cache, batch, plan, choose=backend.index_topk):
            selected.append((batch.forward_mode, layer.layer_id, tuple(q.shape[1:])))
            return choose(q, w, layer, cache, batch, plan)

        backend.index_topk = index_topk
    warmup(dispatcher, index_heads=2)
    assert {(layer, shape) for _, layer, shape in selected} == {(0, (2, 16))}
    counts = {mode: sum(m is mode for m, _, _ in selected) for mode in M if mode is not M.IDLE}
    assert counts == {mode: 6 if mode is M.EXTEND else 3 for mode in counts}
    with pytest.raises(UsageError, match="give index_heads, of their indexers"):
        warmup(dispatcher)
    with pytest.raises(UsageError, match=r"index_topk 64, index_heads None, index_dim 16: a warm"):
        made(replace(SPARSE, index_heads=None))


@pytest.mark.long
def test_flex_attention_compiles_before_the_first_request():
    pytest.importorskip("torch._inductor")
    dispatcher = made(MHA, name="flex_attention")
    warmup(dispatcher)
    backend = dispatcher.routes["prefill"]
    before = backend.compilations
    warmup(dispatcher, max_bs=7)
    assert backend.compilations == before > 0


def test_a_failure_names_backend_and_pass():
    dispatcher, _, dec = make(None)
    dec.forward_decode = lambda *_, **__: 1 / 0
    said = r"decoder failed in forward, layer 0, a decode pass of batch size 1, 1 tokens: Zer"
    with pytest.raises(BackendRunError, match=said):
        warmup(dispatcher)


def test_unknown_shapes_are_refused():
    with pytest.raises(UsageError, match="head_dim None, num_q_heads 4: a warm-up runs kernels"):
        made(LayerRequirements(num_q_heads=4))


def attn(*arguments):
    return CliRunner().invoke(build_app("warmup"), ["warmup", *arguments])


SHAPE = ("--head-dim", "32", "--num-q-heads", "4", "--num-kv-heads", "2", "--dtype", "fp32")


def test_the_command_prints_seconds_per_backend_and_pass():
    native = ("--attention-backend", "torch_native")
    done = attn(*SHAPE, *native, "--max-bs", "2", "--device", "cpu")
    assert done.exit_code == 0, done.exception
    for text in ("torch_native  create", "prefill over a prefix", "decode, batch size 2"):
        assert text in done.output
    assert "5 passes in " in done.output
    found = json.loads(attn(*SHAPE, *native, "--json").output)
    assert found["device"] == str(probe_device())
    assert [p["what"] for p in found["passes"]][:2] == ["create", "prefill"]


def test_the_command_warms_up_the_selection_of_a_sparse_model(tmp_path):
    keys = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_attention_heads": 4}
    indexer = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16, "index_topk_freq": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "glm_moe_dsa", **keys, **indexer}))
    result = CliRunner().invoke(build_app(), ["warmup", str(config), "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    passes = [x["what"] for x in json.loads(result.stdout)["passes"]]
    assert "decode, batch size 1" in passes
    result = CliRunner().invoke(build_app(), ["warmup", "--kind", "dsa", "--num-q-heads", "2"])
    assert result.exit_code == 0, result.output


def test_the_command_takes_a_model(tmp_path):
    config = tmp_path / "config.json"
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config.write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape})
    )
    assert "4 passes in " in attn(str(config), "--deny", "flex_attention").output
    done = attn(str(config), "--model", str(config))
    assert isinstance(done.exception, UsageError)
    assert "name one model" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "npu:910b"], "--device npu:910b: a warm-up runs kernels, and this machine"),
        (["--assume-installed", "triton"], "--assume-installed: a warm-up runs kernels"),
        (["--max-bs", "0"], "--max-bs 0: at least 1"),
        ([], "head_dim None, num_q_heads None: a warm-up runs kernels"),
    ],
)
def test_what_cannot_be_warmed_up_is_said(arguments, said):
    done = attn(*arguments)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(said)
