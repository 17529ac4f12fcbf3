"""Name installed distributions that own the same module, of which one at most can be imported."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.plugins.dependencies import Pin, installed, strangers
from attn_core.spec.device import Device
from attn_core.tools.finding import Finding


def clashes(pins: tuple[Pin, ...], device: Device) -> Iterator[Finding]:
    """Find unrelated projects with a kernel library's module, and libraries beside their like.

    device: the one whose library is kept where both are installed.
    """
    for pin in pins:
        for name in strangers(pin):
            yield Finding(
                name,
                f"has the module {pin.module}",
                "problem",
                f"an unrelated project: {pin.distribution} cannot be imported beside it",
                f"pip uninstall -y {name} && {pin.pip} --force-reinstall --no-deps",
            )
        versions = installed([pin.distribution, pin.replaces] if pin.replaces else [])
        if len(versions) < 2:
            continue
        kept, removed = pin.replaces, pin.distribution
        if device.type == "npu":
            kept, removed = removed, kept
        fix = f"pip install '{kept}=={versions[kept]}' --force-reinstall --no-deps"
        yield Finding(
            pin.distribution,
            versions[pin.distribution] or "found",
            "problem",
            f"it has the files of {pin.replaces}, which is installed too: the last one is imported",
            f"pip uninstall -y {removed} && {fix}",
        )
