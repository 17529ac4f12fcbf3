"""The suite as a pytest class: `class TestAcme(BackendSuite): name = "acme"` is a whole test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from attn_core.capabilities import BackendSpec, Kind
from attn_core.device import parse_device, probe_device
from attn_core.plugins import load_plugins
from attn_core.testing.plan import KINDS, Planned, plan
from attn_core.testing.runner import run_check, torch_device


class BackendSuite:
    """Every check of a declared backend; subclass it and set `name`.

    kinds: the attention families to check. device: "TYPE:ARCH", this machine's where None.
    on: the torch device, `device`'s own where None ("cpu" for an emulation). libraries: the
    distributions taken as installed, those found where None. passes: of each random session.
    reduced: each feature in one place only, for backends whose every shape is compiled.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    device: ClassVar[str | None] = None
    on: ClassVar[str | None] = None
    libraries: ClassVar[Mapping[str, str | None] | None] = None
    passes: ClassVar[int] = 200
    reduced: ClassVar[bool] = False

    @classmethod
    def spec(cls) -> BackendSpec:
        """Return the declaration under test: that of the installed plugin called `name`."""
        return load_plugins().get(cls.name)

    @classmethod
    def planned(cls) -> list[Planned]:
        """List the checks of this backend."""
        device = parse_device(cls.device) if cls.device else probe_device()
        libraries = cls.libraries
        if libraries is None:
            libraries = load_plugins().installed_libraries()
        return plan(
            cls.spec(),
            device,
            libraries,
            kinds=cls.kinds,
            passes=cls.passes,
            reduced=cls.reduced,
        )

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Make one test of each check; those that no row declares are skipped with the reason."""
        if "planned_check" not in metafunc.fixturenames:
            return
        params = [
            pytest.param(
                p,
                id=f"{p.kind}-{p.check.id}",
                marks=[pytest.mark.skip(reason=p.reason)] if p.row is None else [],
            )
            for p in cls.planned()
        ]
        metafunc.parametrize("planned_check", params)

    def test_declared(self, planned_check: Planned) -> None:
        """Put one check to the row that declares it."""
        device = parse_device(self.device) if self.device else probe_device()
        on = torch.device(self.on) if self.on else torch_device(device)
        run_check(planned_check, self.spec(), on)
