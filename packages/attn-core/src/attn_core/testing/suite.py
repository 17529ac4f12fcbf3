"""The suites as pytest classes: `class TestAcme(BackendSuite): name = "acme"` is a whole test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import ClassVar

import pytest
import torch

from attn_core.plugins.registry import load_plugins
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import parse_device, probe_device
from attn_core.spec.kinds import Family, Kind
from attn_core.testing.plan import KINDS, plan
from attn_core.testing.runner import run_check, torch_device
from attn_core.testing.tolerance import Measure

_registry = cache(load_plugins)  # every suite of a process asks the same plugins


class BackendSuite:
    """All checks of a declared softmax backend; subclass it and set `name`.

    kinds: the kinds of attention to check.
    device: "TYPE:ARCH"; None means this machine's.
    on: the torch device; None means that of `device` ("cpu" for an emulation).
    libraries: the distributions assumed to be installed; None means those found.
    passes: passes of each random session.
    reduced: test each feature in one place only, for backends that compile for every shape.
    """

    name: ClassVar[str]
    family: ClassVar[Family] = "softmax"
    kinds: ClassVar[tuple[Kind, ...]] = KINDS
    device: ClassVar[str | None] = None
    on: ClassVar[str | None] = None
    libraries: ClassVar[Mapping[str, str | None] | None] = None
    passes: ClassVar[int] = 200
    reduced: ClassVar[bool] = False

    @classmethod
    def spec(cls) -> BackendSpec:
        """Return the declaration under test, which is that of the installed plugin `name`."""
        return _registry().get(cls.name, cls.family)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Create one test per check. Checks that no row declares are skipped with the reason."""
        if "ask" not in metafunc.fixturenames:
            return
        spec, libraries = cls.spec(), cls.libraries
        device = parse_device(cls.device) if cls.device else probe_device()
        device_run = torch.device(cls.on) if cls.on else torch_device(device)
        if libraries is None:
            libraries = _registry().installed_libraries()
        checks = plan(
            spec, device, libraries, kinds=cls.kinds, passes=cls.passes, reduced=cls.reduced
        )
        params = [
            pytest.param(
                partial(run_check, p, spec, device_run, arch=device.arch),
                id=f"{p.kind}-{p.check.id}",
                marks=[pytest.mark.skip(reason=p.reason)] if p.row is None else [],
            )
            for p in checks
        ]
        metafunc.parametrize("ask", params)

    def test_declared(self, ask: Callable[[], Measure]) -> None:
        """Run one check on the row that declares it."""
        ask()


class LinearSuite(BackendSuite):
    """All checks of a declared linear backend (GDN, KDA); subclass it and set `name`."""

    family = "linear"
