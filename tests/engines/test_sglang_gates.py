"""SGLang's lists of backend names, with attn_core's hooks on the functions that test them."""

import json
import pkgutil
from types import SimpleNamespace

import pytest
from attn_core.integrations.sglang import gates
from attn_core.integrations.sglang.gates import GATES, STAND_IN
from engine_logits import CONFIGS
from engine_passes import server_args
from sglang.srt.arg_groups import overrides, speculative_hook
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

EXAONE = CONFIGS["llama"] | {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "sliding_window": 16,
    "sliding_window_pattern": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()


@pytest.fixture
def server(tmp_path):
    def create(config, **changed):
        (tmp_path / "config.json").write_text(json.dumps(config))
        given = {"attention_backend": "attn_core", "device": "cpu", "load_format": "dummy"}
        given |= {"model_path": str(tmp_path), "skip_tokenizer_init": True}
        return ServerArgs(**(given | changed))

    return create


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.target.rpartition(".")[2])
def test_sglang_applied_every_hook(gate):
    owner, name = gate.target.rsplit(".", 1)
    assert callable(getattr(pkgutil.resolve_name(owner), name))
    assert gate.target in HookRegistry._patched
    assert gate.does


@pytest.mark.parametrize("config", [CONFIGS["gpt_oss"], EXAONE], ids=["gpt-oss", "exaone"])
def test_windowed_models_accept_the_name(server, config):
    args = server(config)
    assert args.get_attention_backends() == ("attn_core", "attn_core")
    with pytest.raises(AssertionError, match=r"required|requires"):
        server(config, attention_backend="flashinfer")


def test_the_other_phase_keeps_its_test(server):
    with pytest.raises(AssertionError, match="flashinfer"):
        server(CONFIGS["gpt_oss"], decode_attention_backend="flashinfer")


def eagle(args, draft_backend):
    args.speculative_algorithm, args.speculative_draft_model_path = "EAGLE", args.model_path
    args.speculative_num_steps, args.speculative_eagle_topk = 3, 4
    args.speculative_num_draft_tokens = 8
    args.speculative_draft_attention_backend = draft_backend
    return args


def test_trees_on_larger_pages_want_a_draft_backend_that_has_them(server):
    for drafts in ("fa3", "attn_core", None):
        args = eagle(server(CONFIGS["llama"], page_size=16), drafts)
        speculative_hook._handle_eagle_family(args)
        assert args.attention_backend == "attn_core"
        assert STAND_IN not in args.get_attention_backends()
    args.speculative_draft_attention_backend = "flashmla"
    with pytest.raises(ValueError, match="page_size"):
        speculative_hook._handle_eagle_family(args)


def test_a_prefix_cache_keeps_states_of_linear_layers_on_attn_core():
    def supports(name):
        view = SimpleNamespace(linear_attn_backend=name)
        return overrides.supports_mamba_cache_extra_buffer(view, "Qwen3NextForCausalLM")

    assert [supports(name) for name in ("attn_core", "triton", "cutedsl")] == [True, True, False]


def test_a_draft_model_has_linear_layers_of_sglangs_own_that_are_never_run():
    names = {"linear_attn_backend": "attn_core", "linear_attn_decode_backend": None}
    names["linear_attn_prefill_backend"] = "attn_core"
    args = server_args(**names)
    runner = SimpleNamespace(is_draft_worker=True, server_args=args)
    seen = gates._hybrid_model(
        lambda run, full: (vars(run.server_args).copy(), full), runner, "full"
    )
    assert seen[1] == "full"
    assert {seen[0][name] for name in names} == {STAND_IN, None}
    assert args.linear_attn_backend == args.linear_attn_prefill_backend == "attn_core"


def test_deterministic_inference_accepts_the_name():
    view = SimpleNamespace(enable_deterministic_inference=True, attention_backend="attn_core")
    assert overrides._deterministic_attention_backend(view) == {}


def test_an_error_under_the_stand_in_leaves_the_name(server):
    args = eagle(server(CONFIGS["llama"]), "fa3")
    args.speculative_use_rejection_sampling = True  # wants chains
    with pytest.raises(ValueError, match="topk"):
        speculative_hook._handle_eagle_family(args)
    assert args.attention_backend == "attn_core"


def test_dual_chunk_models_accept_the_name(server):
    config = CONFIGS["llama"] | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dual_chunk_attention_config": {"chunk_size": 512, "local_size": 128},
    }
    assert server(config).get_attention_backends() == ("attn_core", "attn_core")
    with pytest.raises(ValueError, match="dual_chunk_flash_attn"):
        server(config, attention_backend="triton")
