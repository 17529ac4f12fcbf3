"""attn-core as an attention backend of vLLM: `--attention-backend CUSTOM`.

vLLM finds `register` by the entry point group "vllm.general_plugins" and calls it in every
process. It imports neither torch nor a kernel before the flag names CUSTOM.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)
PATH = f"{__name__}.Backend"  # of the class that vLLM imports once CUSTOM is named
PREFILL_PATH = f"{__name__}.unfolded.PrefillBackend"


def register() -> None:
    """Take vLLM's name CUSTOM. Called by vLLM, and twice is as good as once.

    A release without these registries is left alone: it has to start with its own attention.
    """
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        logger.warning("attn_core is not registered with this release of vLLM: %s", error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        logger.warning(
            "attn_core is not registered: CUSTOM is already %s; name the plugins that vLLM loads "
            "by VLLM_PLUGINS=attn_core",
            custom.get_path(),
        )
        return
    register_backend(custom, PATH)
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, PREFILL_PATH)


def __getattr__(name: str) -> Any:
    """Return the class behind CUSTOM: vLLM has one name for models with MLA and for others.

    Raises UnsupportedError for a release of vLLM that the adapter was not tested with.
    """
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    from attn_core.integrations.vllm.server import check_version

    check_version()
    model = get_current_vllm_config().model_config
    if model is not None and model.use_mla:
        from attn_core.integrations.vllm.latent import LatentBackend

        return LatentBackend
    from attn_core.integrations.vllm.backend import AttnCoreBackend

    return AttnCoreBackend
