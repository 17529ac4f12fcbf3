"""Bound the number of random examples; run `attn` in this process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from attn_core import cli
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples every time, so that a change is judged by the change; `nox -s full` draws new.
settings.register_profile("default", max_examples=60, derandomize=True, **COMMON)
settings.register_profile("random", max_examples=300, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def here(monkeypatch, capfd):
    """Return what runs `attn` in this process: another one takes half a second to start.

    Names are variables of the environment, for this run.
    """
    for name in [n for n in os.environ if n.startswith("ATTN_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = 0
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["attn", *arguments])
            for name, value in environ.items():
                patch.setenv(name, value)
            try:
                cli.main()
            except SystemExit as end:
                code = end.code or 0
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run
