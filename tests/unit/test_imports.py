"""The arrows of the design point one way, and the data side needs no torch."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import attn_core
import pytest

ROOT = pathlib.Path(attn_core.__file__).parent
REPOSITORY = pathlib.Path(__file__).parents[2]
# A module imports from its own folder or from one before it.
TORCH_FREE = (
    "errors",
    "dtypes",
    "formatting",
    "json_text",
    "spec",
    "plugins",
    "costs",
    "selection",
    "model_config",
    "tools",
)
WITH_TORCH = ("cache", "ops", "runtime", "backends", "integrations", "testing", "trust", "measure")
ORDER = {name: place for place, name in enumerate((*TORCH_FREE, *WITH_TORCH, "cli"))}


def modules(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the modules of a package, dotted name → file."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """Return what a file imports of `known`, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_folder_has_a_place():
    folders = {folder(m) for m in modules(ROOT)} - {""}
    assert folders == ORDER.keys()


def test_no_arrow_points_back():
    known = modules(ROOT)
    wrong = [
        f"{module} imports {name}"
        for module, path in known.items()
        for name in imports(path, known) - {"attn_core"}  # its version
        if module != "attn_core" and ORDER[folder(name)] > ORDER[folder(module)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["attn-core", "attn-nvidia"])
def test_no_imports_form_a_circle(package):
    [source] = (REPOSITORY / "packages" / package / "src").iterdir()
    known = modules(source)
    graph = {m: imports(p, known) - {source.name, m} for m, p in known.items()}
    while leaves := {m for m, names in graph.items() if not names & graph.keys()}:
        graph = {m: names for m, names in graph.items() if m not in leaves}
    assert sorted(graph) == [], "these import each other, or what does"


PLUGINS = [
    *(f"packages/attn-{vendor}/src" for vendor in ("nvidia", "rocm", "ascend", "intel")),
    "docs/examples/attn-acme/src",
]


@pytest.mark.parametrize("source", PLUGINS)
def test_a_plugin_imports_public_names_only(source):
    public = set(attn_core.__all__)
    private = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno} {ast.unparse(node)}"
        for path in (REPOSITORY / source).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "attn_core"
            and not (node.module == "attn_core" and {a.name for a in node.names} <= public)
        )
        or (
            isinstance(node, ast.Import)
            and any(a.name.startswith("attn_core.") for a in node.names)
        )
    ]
    assert private == []


def test_the_data_side_imports_no_torch():
    torchy = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0].removesuffix(".py") in TORCH_FREE
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
        or (
            isinstance(node, ast.Import)
            and any(a.name.split(".")[0] == "torch" for a in node.names)
        )
    ]
    assert torchy == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["select", "--device", "cuda:sm100", "--json"], 0),
        (["select", "--json"], 0),
        (["why-not", "fa3", "--device", "cuda:sm80"], 0),
        (["backends", "--json"], 0),
        (["matrix", "--format", "json"], 0),
        (["doctor", "--json"], 0),
        (["check", "triton", "--kind", "gqa"], 2),  # a slip is told at once
        (["generate", "Hello", "--model-path", "/no/such/model"], 2),
        (["generate", "Hello", "--model-path", __file__], 2),
    ],
)
def test_the_command_imports_no_torch_and_no_kernel_library(arguments, code):
    script = (
        "import sys\n"
        f"sys.argv = ['attn', *{arguments!r}]\n"
        "from attn_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n"
        f"    assert (e.code or 0) == {code}, e.code\n"
        "bad = {'torch', 'triton', 'transformers', 'numpy', 'flashinfer'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
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
