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
    for combination in spec.known_bad:
        if (
            (not combination.kinds or row.kind in combination.kinds)
            and phase in combination.phases
            and (not combination.archs or device.arch in combination.archs)
            and (not combination.head_dims or combination.head_dims & dims)
            and all(_may_load(row, Requirement(text), libraries) for text in combination.libraries)
        ):
            versions = _versions_text(combination, libraries)
            text = f"known to be bad{versions}: {combination.why}"
            yield Mismatch("known_bad", text, combination.source)


def _may_load(row: Capabilities, requirement: Requirement, libraries: Libraries) -> bool:
    """Say whether a row runs with such a version. One that is not known is no reason."""
    name = canonicalize_name(requirement.name)
    version = libraries.get(name)
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return False
    loaded = [used(group, libraries) for group in row.requires if name in _names(group)]
    return not loaded or any(x is not None and canonicalize_name(x.name) == name for x in loaded)


def _names(group: str) -> list[str]:
    return [canonicalize_name(Requirement(part).name) for part in group.split(" or ")]


def _versions_text(combination: KnownBad, libraries: Libraries) -> str:
    names = [canonicalize_name(Requirement(text).name) for text in combination.libraries]
    return f" with {', '.join(f'{n} {libraries[n]}' for n in names)}" if names else ""
