"""Match what is asked with the combinations that a plugin knows to be bad."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attn_core.plugins.dependencies import Libraries, used
from attn_core.selection.mismatch import Mismatch
from attn_core.spec.capabilities import BackendSpec, Capabilities, KnownBad
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Requirements


def known_bad_gaps(
    spec: BackendSpec,
    row: Capabilities,
    needs: Requirements,
    device: Device,
    libraries: Libraries,
    phase: Phase,
) -> Iterator[Mismatch]:
    """Yield each known bad combination that a row would run in, with its source."""
    layers = needs.layers if phase is not Phase.ENCODE else (needs.vision,) * bool(needs.vision)
    dims = {x.head_dim for x in layers if x is not None and x.kind == row.kind}
    for bad in spec.known_bad:
        if (
            (not bad.kinds or row.kind in bad.kinds)
            and phase in bad.phases
            and (not bad.archs or device.arch in bad.archs)
            and (not bad.head_dims or bad.head_dims & dims)
            and all(_runs(row, Requirement(text), libraries) for text in bad.libraries)
        ):
            yield Mismatch("known_bad", f"known to be bad{_asked(bad, libraries)}: {bad.why}",
                           bad.source)  # fmt: skip


def _runs(row: Capabilities, wanted: Requirement, libraries: Libraries) -> bool:
    """Say whether a row runs with such a version. One that is not known is no reason."""
    name = canonicalize_name(wanted.name)
    version = libraries.get(name)
    if version is None or not wanted.specifier.contains(version, prereleases=True):
        return False
    taken = [used(group, libraries) for group in row.requires if name in _names(group)]
    return not taken or any(x is not None and canonicalize_name(x.name) == name for x in taken)


def _names(group: str) -> list[str]:
    return [canonicalize_name(Requirement(part).name) for part in group.split(" or ")]


def _asked(bad: KnownBad, libraries: Libraries) -> str:
    names = [canonicalize_name(Requirement(text).name) for text in bad.libraries]
    return f" with {', '.join(f'{n} {libraries[n]}' for n in names)}" if names else ""
