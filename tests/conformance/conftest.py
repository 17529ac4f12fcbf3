"""With --anew, tests write what they compare with: killers.txt and skips.txt."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--anew", action="store_true", help="write killers.txt and skips.txt anew")


@pytest.fixture
def anew(request):
    """Whether what a test finds is to be written down."""
    return request.config.getoption("--anew", default=False)
