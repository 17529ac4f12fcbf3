"""Make the reference backend and its mutants importable by name, as `create` names them."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


# Not timed on idle cores yet: `nox -s full` runs them, with everything else that is marked long.
LONG = {"test_mutants.py", "test_flex_attention.py", "test_suite.py"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
