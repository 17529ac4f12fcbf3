"""With --anew, tests write what they compare with; intel_amx's tests share a compiled library."""

import fcntl
import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--anew", action="store_true", help="write killers.txt and skips.txt anew")


@pytest.fixture
def anew(request):
    """Whether what a test finds is to be written down."""
    return request.config.getoption("--anew", default=False)


@pytest.fixture(scope="session")
def over_emulated_tiles(tmp_path_factory):
    """Compile intel_amx for AMX, in plain C: for 10 s, once for all processes of a run."""
    from amx_kernels import emulated_tiles

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "tiles"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = [*folder.glob("*.so")]
        return made[0] if made else emulated_tiles(patch, folder)
