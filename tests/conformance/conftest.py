"""With --anew, tests write what they compare with; intel_amx's tests share a compiled library."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--anew", action="store_true", help="write killers.txt and skips.txt anew")


@pytest.fixture
def anew(request):
    """Whether what a test finds is to be written down."""
    return request.config.getoption("--anew", default=False)


@pytest.fixture(scope="session")
def over_emulated_tiles(tmp_path_factory):
    """Compile intel_amx for AMX, in plain C: for 10 s, once a process."""
    from amx_kernels import emulated_tiles

    with pytest.MonkeyPatch.context() as patch:
        return emulated_tiles(patch, tmp_path_factory.mktemp("tiles"))
