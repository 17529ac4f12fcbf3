"""attn-core as an attention backend of SGLang: `--attention-backend attn_core`.

SGLang finds `register` by the entry point group "sglang.srt.plugins" and calls it in every
process. It imports neither torch nor a kernel before the flag names attn_core.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Add the name to SGLang's backends. Called by SGLang, and twice is as good as once."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from attn_core.integrations.sglang.server import DRAFTS, NAME, TREES, has_version

    if NAME in server_args.ATTENTION_BACKEND_CHOICES:
        return
    server_args.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)
    if has_version(TREES):
        # The drafts alone make a mask of [B, n, n]; SGLang's own has a column for every token of
        # the context. Its speculative workers read the mode once, when they are created.
        target = "sglang.srt.speculative.eagle_utils.default_tree_mask_mode"
        HookRegistry.register(target, _mask_of_drafts, HookType.AFTER)
    if has_version(DRAFTS):
        # SGLang's factory of draft backends knows its own names alone.
        factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
        for name, create in (
            ("create_decode_backend", _create_draft_decode),
            ("create_draft_extend_backend", _create_draft_extend),
        ):
            HookRegistry.register(f"{factory}.{name}", create, HookType.AROUND)


def _create(runner: Any) -> Any:
    """Create the backend of a model runner; SGLang's registry calls it."""
    from attn_core.integrations.sglang.backend import AttnCoreBackend
    from attn_core.integrations.sglang.server import check_tree_masks

    check_tree_masks(runner.server_args)
    return AttnCoreBackend(runner)


def _mask_of_drafts(mode: Any) -> Any:
    """Return the compact tree mask where attn-core verifies, else what SGLang returned."""
    from sglang.srt.runtime_context import get_server_args

    from attn_core.integrations.sglang.server import verifies

    return mode.QLEN_ONLY if verifies(get_server_args()) else mode


def _create_draft_decode(create: Any, factory: Any) -> Any:
    """Create the backend of a draft model's decode steps; the first draft needs none."""
    from attn_core.integrations.sglang.server import drafts

    steps = factory.speculative_num_steps
    if steps <= 1 or not drafts(factory.server_args, "decode"):
        return create(factory)
    from attn_core.integrations.sglang.drafts import DraftDecodeBackend

    return DraftDecodeBackend(_create(factory.draft_model_runner), factory.topk, steps - 1)


def _create_draft_extend(create: Any, factory: Any) -> Any:
    """Create the backend with which a draft model takes in prompts and accepted tokens."""
    from attn_core.integrations.sglang.server import drafts

    if not drafts(factory.server_args, factory.server_args.speculative_attention_mode):
        return create(factory)
    return _create(factory.draft_model_runner)
