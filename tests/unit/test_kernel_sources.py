"""What Triton refuses, and neither the interpreter nor the emulation does."""

import ast
import pathlib

SOURCES = pathlib.Path(__file__).parents[2] / "packages/attn-core/src/attn_core"


def chained(path):
    """Yield where a kernel of a file compares three values at once."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and any(
            ast.unparse(x).startswith(("gluon.jit", "triton.jit")) for x in function.decorator_list
        ):
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and len(node.ops) > 1:
                    yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_kernels_compare_two_values_at_a_time():
    files = [path for path in SOURCES.rglob("*.py") if ".jit" in path.read_text()]
    assert len(files) > 20
    assert [where for path in files for where in chained(path)] == []
