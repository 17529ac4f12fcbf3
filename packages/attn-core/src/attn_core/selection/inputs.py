"""All inputs of a selection as one value that changes can be applied to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.mismatch import Fix, changed
from attn_core.selection.result import Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements


@dataclass(frozen=True)
class SelectionInputs:
    """All inputs of select(), so that a change can be applied to them."""

    requirements: Requirements
    device: Device
    libraries: Libraries
    overrides: Overrides
    simulated: bool = False

    def apply(self, changes: tuple[Fix, ...]) -> SelectionInputs:
        """Return the inputs after `changes`. Another device is a simulated one."""
        needs, device, overrides = self.requirements, self.device, self.overrides
        libraries = dict(self.libraries)
        for change in changes:
            values: dict[str, Any] = dict(change.values)
            if change.target in ("requirements", "speculation"):
                needs = changed(needs, change)
            elif change.target == "device":
                device = replace(device, **values)
            elif change.target == "libraries":
                libraries.update(values)
            elif change.target == "overrides":
                overrides = replace(overrides, **values)
            elif change.target == "vision":
                old = needs.vision or LayerRequirements(encoder=True)
                tower = values["tower"] if "tower" in values else replace(old, **values)
                needs = replace(needs, vision=tower)
            else:
                others = [x for x in needs.layers if x.family != change.target]
                if "layers" not in values:
                    own = (x for x in needs.layers if x.family == change.target)
                    values["layers"] = [replace(x, **values) for x in own]
                needs = replace(needs, layers=tuple(dict.fromkeys((*values["layers"], *others))))
        moved = (device.type, device.arch) != (self.device.type, self.device.arch)
        return SelectionInputs(needs, device, libraries, overrides, self.simulated or moved)

    def select(self, registry: Registry, *, advise: bool = True) -> Selection:
        """Run select() on these inputs."""
        return select(
            self.requirements,
            self.device,
            registry,
            self.libraries,
            self.overrides,
            simulated=self.simulated,
            advise=advise,
        )
