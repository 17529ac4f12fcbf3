"""The hooks a plugin implements, in the entry-point group "attn_core"."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from attn_core.capabilities import BackendSpec

GROUP = "attn_core"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def attn_register_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]  # a hookspec has no body
    """Return the backends of this plugin.

    Called once when plugins are loaded, before any device is touched: import no torch and no
    kernel library here.
    """
