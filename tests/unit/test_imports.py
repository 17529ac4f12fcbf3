"""The arrows of the design point one way, and the data side needs no torch."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import attn_core
import pytest

ROOT = pathlib.Path(attn_core.__file__).parent
# From the data to the kernels: a module imports from its own layer or from one before it.
LAYERS = (
    {"errors", "capabilities", "libraries", "environment", "streams"},
    {"hookspecs", "page_size", "listing"},
    {"declared"},
    {"changes"},
    {"unmet"},
    {"plugins", "proofs", "device", "decision", "models"},
    {"explain", "weigh", "matrix", "doctor"},
    {"advice"},
    {"selection"},
    {"situation"},
    {"change_search"},
    {"why_not"},
    # here torch begins
    {"forward", "quant", "slots", "merge"},
    {"kv_cache"},
    {"page_table"},
    {"allocator"},
    {"backend", "operands", "refusals", "roles"},
    {"backends", "failures"},
    {"dispatcher", "graph"},
    {"integrations", "testing", "warmup"},
    {"cli"},
)
DATA = set().union(*LAYERS[:12])
LAYER_OF = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FREE = {  # may be imported before their layer: lazily, inside the function that needs them
    ("decision", "explain"),
}


def top(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # annotations are no arrows
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_core"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("attn_core.")}
    return found & LAYER_OF.keys()


def test_every_module_has_a_layer():
    modules = {top(p) for p in ROOT.rglob("*.py")} - {"__init__"}
    assert modules <= LAYER_OF.keys(), f"give {modules - LAYER_OF.keys()} a layer"


def test_no_arrow_points_back():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in ROOT.rglob("*.py")
        if (mine := top(path)) != "__init__"
        for name in imports(path)
        if LAYER_OF[name] > LAYER_OF[mine] and (mine, name) not in FREE
    ]
    assert wrong == []


def test_the_data_side_imports_no_torch():
    torchy = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if top(path) in DATA
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
        or (
            isinstance(node, ast.Import)
            and any(a.name.split(".")[0] == "torch" for a in node.names)
        )
    ]
    assert torchy == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["select", "--device", "cuda:sm100", "--json"],
        ["select", "--json"],
        ["why-not", "fa3", "--device", "cuda:sm80"],
        ["backends", "--json"],
        ["matrix", "--format", "json"],
        ["doctor", "--json"],
    ],
)
def test_the_command_imports_no_torch_and_no_kernel_library(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['attn', *{arguments!r}]\n"
        "from attn_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert e.code in (0, None), e.code\n"
        "bad = {'torch', 'triton', 'transformers', 'numpy', 'flashinfer'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_vendor_rows_import_nothing_but_the_contract():
    import attn_ascend
    import attn_intel
    import attn_nvidia
    import attn_rocm

    for package in (attn_ascend, attn_intel, attn_nvidia, attn_rocm):
        code = (
            f"import sys, {package.__name__}\n"
            "assert 'torch' not in sys.modules and 'attn_core.runtime.backend' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
