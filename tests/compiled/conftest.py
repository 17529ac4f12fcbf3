"""With --evidence, tests record what they compile."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--evidence", action="store_true", help='write evidence of level "compiled"')


@pytest.fixture
def evidence(request):
    """Return what writes the evidence of a chip, and does nothing without --evidence."""
    if not request.config.getoption("--evidence", default=False):
        return lambda *_: None
    import compiled_evidence

    return compiled_evidence.write
