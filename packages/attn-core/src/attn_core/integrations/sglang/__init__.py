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

    from attn_core.integrations.sglang.gates import register_gates
    from attn_core.integrations.sglang.server import NAME

    if NAME in server_args.ATTENTION_BACKEND_CHOICES:
        return
    server_args.add_attention_backend_choices([NAME])
    if hasattr(server_args, "add_linear_attn_kernel_backend_choices"):
        server_args.add_linear_attn_kernel_backend_choices([NAME])
    server_args.add_deterministic_attention_backend_choices([NAME])
    if hasattr(server_args, "add_chunked_prefix_cache_attention_backend"):  # not in 0.5.15
        server_args.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(_create)
    register_gates()


def _create(runner: Any) -> Any:
    from attn_core.integrations.sglang.backend import create

    return create(runner)
