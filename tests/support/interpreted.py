"""A registry whose triton runs on a CPU, in Triton's interpreter, for tests of what chooses it."""

from __future__ import annotations

from dataclasses import replace

from attn_core.plugins.registry import Registry, load_plugins


def interpreted() -> Registry:
    """Return all plugins, with a triton that declares the CPU and no other device."""
    registry = load_plugins()
    triton = registry.get("triton")
    row = replace(triton.capabilities[0], device="cpu", archs=frozenset())
    own = {("softmax", "triton"): replace(triton, capabilities=[row])}
    return replace(registry, backends={**registry.backends, **own})
