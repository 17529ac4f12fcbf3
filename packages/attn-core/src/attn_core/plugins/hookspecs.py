"""The hooks a plugin implements, in the entry-point group "attn_core"."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pluggy

from attn_core.formatting import near
from attn_core.plugins.dependencies import Pin
from attn_core.spec.capabilities import BackendSpec

GROUP = "attn_core"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def attn_register_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]  # a hookspec has no body
    """Return the backends of this plugin.

    Called once when plugins are loaded, before any device is touched. Do not import torch or a
    kernel library here.
    """


@hookspec
def attn_register_pins() -> Sequence[Pin]:  # type: ignore[empty-body]  # a hookspec has no body
    """Return the library versions that match each torch; `attn doctor` prints them. Optional.

    Called once when plugins are loaded, like attn_register_backends.
    """


@hookspec
def attn_register_libraries() -> Sequence[str]:  # type: ignore[empty-body]  # a hookspec has no body
    """Return the plugin's own compiled libraries that are here: NAME or NAME==VERSION. Optional.

    Rows require them by name, as they require distributions. Called once when plugins are loaded,
    like attn_register_backends; say only what lies on the disk, load nothing.
    """


def hooks_of(module: Any, name: str) -> pluggy.HookRelay:
    """Return the hooks of a plugin's module.

    Raises pluggy's error for arguments that a hook does not have, and TypeError for a function that
    is marked @hookimpl and has the name of no hook: nothing would call it.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(sys.modules[__name__])
    known = list(vars(manager.hook))
    manager.register(module, name)
    for hook in manager.get_hookcallers(module) or ():
        if not hook.has_spec() and any(not x.optionalhook for x in hook.get_hookimpls()):
            raise TypeError(f"unknown hook {hook.name}: {near(hook.name, known)}")
    return manager.hook
