"""Where SGLang compares the name of a backend with a list of its own, and how attn_core passes.

Each gate is a hook of SGLang's HookRegistry on one function. Most run it under a name that its list
holds: during the call the server arguments name STAND_IN, which the function treats as it treats a
name it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet

from attn_core.integrations.sglang.server import (
    CHUNKED,
    DRAFTS,
    LINEAR,
    NAME,
    TESTED,
    TREES,
    drafts,
    has_version,
    verifies,
)
from attn_core.selection.checks import BACKEND_ARGUMENTS, LINEAR_ARGUMENTS

STAND_IN = "triton"  # of SGLang: no page size, no cache dtype and no graph depends on this name
WINDOWED_MODELS = ("GptOssForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM")
# draft backends whose branches may lie on larger pages; None: as the target's
PAGED_TREES = (None, NAME, "fa3", "flashinfer", "triton")
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One hook.

    target: the dotted path of SGLang's function.
    seen: the releases whose function was read; in others it stays as it is.
    does: what the hook changes.
    kind: the name of SGLang's HookType.
    """

    target: str
    seen: SpecifierSet
    does: str
    kind: str
    hook: Callable[..., Any]


def register_gates() -> None:
    """Register the gates of the installed release; SGLang applies them after its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for gate in GATES:
        if has_version(gate.seen):
            HookRegistry.register(gate.target, gate.hook, HookType[gate.kind])


@contextmanager
def _stand_in(args: Any, names: Iterable[str]) -> Iterator[None]:
    """Let these arguments name STAND_IN instead of attn_core for a while."""
    fields = [field for field in names if getattr(args, field) == NAME]
    for field in fields:
        setattr(args, field, STAND_IN)
    try:
        yield
    finally:
        for field in fields:
            setattr(args, field, NAME)


def _under_stand_in(function: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    """Call a function that tests the backends' names, and put attn_core's name back."""
    with _stand_in(args, BACKEND_ARGUMENTS):
        return function(args, *rest, **named)


def _windowed_models(function: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    """Let attn_core serve models whose windows and sinks its rows declare."""
    if NAME in args.get_attention_backends() and _architecture(args) in WINDOWED_MODELS:
        return _under_stand_in(function, args, *rest, **named)
    return function(args, *rest, **named)


def _architecture(args: Any) -> str:
    """Return the model's class; "" for weights that another server sends with their config."""
    from sglang.srt import server_args

    if server_args.parse_connector_type(args.model_path) == server_args.ConnectorType.INSTANCE:
        return ""
    return str(args.get_model_config().hf_config.architectures[0])


def _paged_trees(function: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    """Let attn_core verify trees on larger pages, where SGLang's draft backend takes them."""
    if verifies(args) and args.speculative_draft_attention_backend in PAGED_TREES:
        return _under_stand_in(function, args, *rest, **named)
    return function(args, *rest, **named)


def _compact_masks(mode: Any) -> Any:
    """Return the compact tree mask where attn-core verifies, else what SGLang returned."""
    from sglang.srt.runtime_context import get_server_args

    return mode.QLEN_ONLY if verifies(get_server_args()) else mode


def _draft_decode(function: Callable[..., Any], factory: Any) -> Any:
    """Create the backend of a draft model's decode steps; the first draft needs none."""
    steps = factory.speculative_num_steps
    if steps <= 1 or not drafts(factory.server_args, "decode"):
        return function(factory)
    from attn_core.integrations.sglang.draft_trees import decode_backend

    return decode_backend(factory.draft_model_runner, factory.topk, steps - 1)


def _draft_extend(function: Callable[..., Any], factory: Any) -> Any:
    """Create the backend with which a draft model takes in prompts and accepted tokens."""
    if not drafts(factory.server_args, factory.server_args.speculative_attention_mode):
        return function(factory)
    from attn_core.integrations.sglang.backend import create

    return create(factory.draft_model_runner)


def _hybrid_model(function: Callable[..., Any], runner: Any, full: Any) -> Any:
    """Serve the linear layers of a hybrid model, where attn_core is asked to."""
    from attn_core.integrations.sglang.linear_layers import served_layers

    layers = served_layers(runner)
    if not layers:  # beside a draft model SGLang creates kernels that are never run
        with _stand_in(runner.server_args, LINEAR_ARGUMENTS):
            return function(runner, full)
    from attn_core.integrations.sglang.linear import hybrid_backend

    return hybrid_backend(runner, full, layers)


def _kept_states(function: Callable[..., Any], view: Any, architecture: str) -> Any:
    """Let a prefix cache keep states inside prompts, where attn_core is named for linear layers."""
    if view.linear_attn_backend == NAME:
        view = SimpleNamespace(linear_attn_backend=STAND_IN)
    return function(view, architecture)


def _dual_chunk_model(function: Callable[..., Any], view: Any) -> Any:
    """Let attn_core serve dual chunk attention, for which SGLang takes one name alone."""
    return {} if view.attention_backend == NAME else function(view)


def _vision_choice(result: None, parser: Any) -> None:
    """Let --mm-attention-backend name attn_core."""
    choices = parser._option_string_actions["--mm-attention-backend"].choices
    if NAME not in choices:
        choices.append(NAME)


def _vision_backend(name: str, *args: Any) -> None:
    """Add attn_core to the classes of vision attention, just before one of them is created."""
    if name == NAME:
        from sglang.srt.layers.attention.vision import QKV_BACKEND_IMPL

        from attn_core.integrations.sglang.vision import VisionAttnCore

        QKV_BACKEND_IMPL[NAME] = VisionAttnCore


GATES = (
    Gate(
        target="sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        seen=LINEAR,
        does="the linear layers of a hybrid model run on attn_core",
        kind="AROUND",
        hook=_hybrid_model,
    ),
    Gate(
        target="sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
        seen=TESTED,
        does="gpt-oss and EXAONE 4 accept attn_core",
        kind="AROUND",
        hook=_windowed_models,
    ),
    Gate(
        target="sglang.srt.arg_groups.speculative_hook._handle_eagle_family",
        seen=TREES,
        does="draft trees of EAGLE on pages of more than one token accept attn_core",
        kind="AROUND",
        hook=_paged_trees,
    ),
    Gate(  # SGLang's own mask has a column for every token of the context; its workers ask once
        target="sglang.srt.speculative.eagle_utils.default_tree_mask_mode",
        seen=TREES,
        does="tree masks have a column for each draft only",
        kind="AFTER",
        hook=_compact_masks,
    ),
    Gate(  # SGLang's factory of draft backends knows its own names alone
        target=f"{_FACTORY}.create_decode_backend",
        seen=DRAFTS,
        does="a draft model decodes on attn_core",
        kind="AROUND",
        hook=_draft_decode,
    ),
    Gate(
        target=f"{_FACTORY}.create_draft_extend_backend",
        seen=DRAFTS,
        does="a draft model takes in tokens on attn_core",
        kind="AROUND",
        hook=_draft_extend,
    ),
    Gate(
        target="sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer",
        seen=LINEAR,
        does="a prefix cache with extra_buffer accepts attn_core for linear layers",
        kind="AROUND",
        hook=_kept_states,
    ),
    Gate(
        target="sglang.srt.arg_groups.overrides._attention_backend_dual_chunk",
        seen=CHUNKED,
        does="models of dual chunk attention accept attn_core",
        kind="AROUND",
        hook=_dual_chunk_model,
    ),
    Gate(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        seen=TESTED,
        does="--mm-attention-backend accepts attn_core",
        kind="AFTER",
        hook=_vision_choice,
    ),
    Gate(
        target="sglang.srt.layers.attention.vision.VisionAttention._determine_attention_backend",
        seen=TESTED,
        does="a vision tower finds the class of attn_core",
        kind="AFTER",
        hook=_vision_backend,
    ),
)
