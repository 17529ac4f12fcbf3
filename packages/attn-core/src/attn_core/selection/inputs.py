"""All inputs of a selection as one value that fixes can be applied to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.mismatch import Fix, apply_fix
from attn_core.selection.result import Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements


@dataclass(frozen=True)
class SelectionInputs:
    """All inputs of select(), so that a fix can be applied to them."""

    requirements: Requirements
    device: Device
    libraries: Libraries
    overrides: Overrides
    simulated: bool = False
    profile: Profile | None = None  # as select() takes it
    workload: Workload = field(default_factory=Workload)

    def apply(self, fixes: tuple[Fix, ...]) -> SelectionInputs:
        """Return the inputs after `fixes`. Another device is a simulated one."""
        needs, device, overrides = self.requirements, self.device, self.overrides
        libraries = dict(self.libraries)
        for fix in fixes:
            values: dict[str, Any] = dict(fix.values)
            if fix.target in ("requirements", "speculation"):
                needs = apply_fix(needs, fix)
            elif fix.target == "device":
                device = replace(device, **values)
            elif fix.target == "libraries":
                libraries.update(values)
            elif fix.target == "overrides":
                overrides = replace(overrides, **values)
            elif fix.target == "vision":
                old = needs.vision or LayerRequirements(encoder=True)
                tower = values["tower"] if "tower" in values else replace(old, **values)
                needs = replace(needs, vision=tower)
            else:
                other_layers = [x for x in needs.layers if x.family != fix.target]
                if "layers" not in values:
                    family_layers = (x for x in needs.layers if x.family == fix.target)
                    values["layers"] = [replace(x, **values) for x in family_layers]
                needs = replace(
                    needs, layers=tuple(dict.fromkeys((*values["layers"], *other_layers)))
                )
        device_changed = (device.type, device.arch) != (self.device.type, self.device.arch)
        return SelectionInputs(
            needs,
            device,
            libraries,
            overrides,
            self.simulated or device_changed,
            None if device_changed else self.profile,
            self.workload,
        )

    def select(self, registry: Registry, *, advise: bool = True) -> Selection:
        """Run select() on these inputs."""
        return select(
            self.requirements,
            self.device,
            registry,
            self.libraries,
            self.overrides,
            self.profile,
            workload=self.workload,
            simulated=self.simulated,
            advise=advise,
        )
