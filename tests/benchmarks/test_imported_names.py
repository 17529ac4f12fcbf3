"""Scripts that only engines run name what benchmarks and the package still have."""

import ast
import importlib
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parents[1]
SCRIPTS = [*TESTS.glob("engines/*.py"), *TESTS.glob("support/*.py"), *TESTS.glob("device/*.py")]


def imported(path):
    """Yield (module, name) of every `from benchmarks… import name` of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
            yield from ((node.module, alias.name) for alias in node.names)


FOUND = [(path, *each) for path in SCRIPTS for each in imported(path)]


@pytest.mark.parametrize(
    ("path", "module", "name"), FOUND, ids=[f"{p.stem}-{m}.{n}" for p, m, n in FOUND]
)
def test_a_name_of_benchmarks_is_there(path, module, name):
    if not hasattr(importlib.import_module(module), name):
        importlib.import_module(f"{module}.{name}")


def test_scripts_of_engines_were_read():
    assert {"engine_ranks", "test_sglang_ranks"} <= {path.stem for path, *_ in FOUND}
