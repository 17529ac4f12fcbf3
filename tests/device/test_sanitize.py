"""The script that runs device tests under compute-sanitizer, with a checker that only prints."""

import os
import pathlib
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = pathlib.Path(__file__).parent / "sanitize.py"


def run(folder, *arguments):
    """Run the script; pytest itself only says its version, the checker what it was given."""
    env = {k: v for k, v in os.environ.items() if k != "CUDA_HOME"} | {"PATH": str(folder)}
    arguments += ("--version",) if "--" in arguments else ("--", "--version")
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True
    )


def fake(folder, code):
    path = folder / "compute-sanitizer"
    path.write_text(f'#!/bin/sh\necho "$@" "$PYTORCH_NO_CUDA_MEMORY_CACHING"\nexit {code}\n')
    path.chmod(0o755)


def test_the_tests_run_under_the_checker(tmp_path):
    fake(tmp_path, 1)
    done = run(tmp_path, "fa3", "flashmla", "--", "--maxfail=3")
    assert done.returncode == 1, "what the checker found"
    first, checked = done.stdout.splitlines()
    assert first.startswith("pytest "), "what they compile is compiled without the checker"
    assert checked.startswith("--tool memcheck --error-exitcode 1 --target-processes all")
    assert "--kernel-name-exclude kns=_ZN2at " in checked
    assert "(TestFA3 or TestFlashMLA) and (" in done.stdout
    assert done.stdout.rstrip().endswith("--maxfail=3 --version 1")


def test_the_kernels_run_alone_or_with_the_rest(tmp_path):
    fake(tmp_path, 0)
    alone, all_of_them = (run(tmp_path, *names).stdout for names in (["kernels"], []))
    assert "test_linear_kernels.py -k test_kernels or test_linear_kernels and not graph" in alone
    assert "test_triton.py" not in alone
    assert "test_triton.py" in all_of_them
    assert "or test_kernels" in all_of_them


def test_a_part_of_the_kernels_runs_under_another_tool(tmp_path):
    fake(tmp_path, 0)
    out = run(tmp_path, "--tool", "racecheck", "sparse", "dual-chunk", "linear").stdout
    assert "\n--tool racecheck " in out
    assert "-k dsa-many-selected-bf16 or " in out
    assert " or dual-chunk-sparse-heads or prefill[gdn-bf16] or " in out
    assert out.count("test_kernels.py") == 1
    assert "-k prompts" in run(tmp_path, "prompts").stdout
    refused = run(tmp_path, "--tool", "leakcheck")
    assert refused.returncode == 2
    assert "invalid choice: 'leakcheck'" in refused.stderr


def test_what_the_parts_name_is_there():
    """As pytest's -k finds it: by a part of the test's name and parameters."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import sanitize
    finally:
        sys.path.remove(str(SCRIPT.parent))
    from sparse_routes import ROUTES

    text = (SCRIPT.parent / "test_kernels.py").read_text()
    ids = {"-".join(route) for route in ROUTES} | {*re.findall(r'\("(dual-chunk[\w-]+)", ', text)}
    for name in ("sparse", "dual-chunk"):
        (_,), which = sanitize.KERNELS[name]
        requested = {*which.split(" or ")}
        requested -= {"beside_attention", "rows_that_are_selected", "scores_of_a_prompt"}
        assert requested <= ids
    assert "def test_what_stands_beside_attention" in text
    assert "def test_rows_that_are_selected" in text
    assert "def test_scores_of_a_prompt" in text
    requested = sanitize.KERNELS["latent"][1].split(" or ")
    assert all(f'"{test.removesuffix("]")}": (' in text for test in requested)
    alone = [name for name in sanitize.KERNELS if re.match("(latent|sparse|dual-chunk)-", name)]
    assert len(alone) == 13
    assert all(" or " not in sanitize.KERNELS[name][1] for name in alone)
    assert {ROUTES["dsa-many-selected", "bf16"], ROUTES["dsa-decode-fp8", "bf16"]} == {
        "cut", "decoded",
    }  # fmt: skip
    (file,), which = sanitize.KERNELS["linear"]
    text = (SCRIPT.parent / file).read_text()
    for one in which.split(" or "):
        test, _, parameters = one.rstrip("]").partition("[")
        assert re.search(rf"def test_\w*{test}\(", text)
        layer = re.match(r"[a-z]+(?:-\d+-by-\d+)?", parameters)[0]
        assert f'"{layer}": ' in text


def test_every_kernel_is_run_under_the_checker():
    """What a module launches, `name[grid](…)` or a launcher, a test of kernels names."""
    pytest.importorskip("triton")
    sources = [
        path.read_text()
        for package in ("attn_core.backends.triton", "attn_core.ops.triton")
        for path in pathlib.Path(find_spec(package).origin).parent.rglob("*.py")
    ]
    ways = (r"^    +(\w+)\[(?:\(.*\)|grid)\]\($", r"(?<!def )_?[Ll]auncher\(\s*(\w+),")
    launched = {n for s in sources for way in ways for n in re.findall(way, s, re.M)}
    launched -= {"kernel", "grid"}  # variables where launchers are made and called
    tests = ("test_kernels.py", "test_linear_kernels.py", "test_gathered_pages.py")
    text = "".join((SCRIPT.parent / name).read_text() for name in tests)
    named = {*re.findall(r'"(\w+)"', text)}
    assert {"extend_hopper", "order_requests", "_write", "merge_splits"} <= launched
    assert launched <= named


def test_a_missing_checker_is_said(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "CUDA toolkit" in done.stderr


def test_an_unknown_backend_is_said(tmp_path):
    fake(tmp_path, 0)
    done = run(tmp_path, "fa33")
    assert done.returncode == 1
    assert "fa33: no such backend" in done.stderr


def test_every_class_of_the_device_tests_is_known():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import sanitize
    finally:
        sys.path.remove(str(SCRIPT.parent))
    for name in ("test_nvidia.py", "test_triton.py"):
        text = (SCRIPT.parent / name).read_text()
        classes = {line.split("(")[0][6:] for line in text.splitlines() if "class Test" in line}
        known = tuple(sanitize.CLASSES.values())  # pytest -k finds those that begin so, too
        assert [c for c in classes if not c.startswith(known)] == []
