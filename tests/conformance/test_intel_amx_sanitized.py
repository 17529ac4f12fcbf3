"""intel_amx's C code under the address and the undefined-behaviour sanitizer."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from amx_kernels import compiled
from attn_intel.cpu import build

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # libasan needs C++'s throw
EDGES = pathlib.Path(__file__).parent / "test_intel_amx_edges.py"
CASES = "(random_cases_agree and not many) or threads_of_python or forked or not_read"


def run_cases(monkeypatch, folder, source):
    """Run cases over the source, compiled with sanitizers under the name that is looked for."""
    gcc = shutil.which("gcc")
    if (reason := build.unsupported()) is not None or gcc is None:
        pytest.skip(f"no GCC for the sanitizers: {reason or 'gcc is not found'}")
    if (build.SOURCE.parent / build.name()).is_file():
        pytest.skip("the package has kernels of its own, which are found first")
    found = [
        subprocess.run([gcc, f"-print-file-name={x}"], capture_output=True, text=True, check=True)
        for x in RUNTIMES
    ]
    runtimes = [x.stdout.strip() for x in found]
    if not all(os.path.isabs(x) for x in runtimes):
        pytest.skip("GCC has no sanitizers here")
    name, run = build.name(), build._run

    def sanitized(command):
        compiles = "-c" in command
        words = ["-O1" if x == "-O3" else x for x in command[1:]]
        run((command[0], *SANITIZE, *(("-fno-omit-frame-pointer", "-g") * compiles), *words))

    with monkeypatch.context() as patch:
        patch.setenv("CC", gcc)
        patch.setattr(build, "SOURCE", source)
        patch.setattr(build, "_run", sanitized)
        build.build(folder / "attn-intel").rename(folder / "attn-intel" / name)
    asked = [sys.executable, "-m", "pytest", "-xs", "-p", "no:cacheprovider", str(EDGES)]
    options = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(runtimes)}
    environment = {**os.environ, **options, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [*asked, "-k", CASES], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_no_case_leaves_its_memory(monkeypatch, tmp_path):
    compiled()
    done = run_cases(monkeypatch, tmp_path, build.SOURCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout, done.stdout


@pytest.mark.long
def test_a_row_that_is_read_too_far_is_seen(monkeypatch, tmp_path):
    compiled()
    source = tmp_path / "source"
    shutil.copytree(build.SOURCE, source)
    text = (source / "rows.h").read_text()
    assert text.count(" && dim == padded;") == 1
    (source / "rows.h").write_text(text.replace(" && dim == padded;", ";"))
    done = run_cases(monkeypatch, tmp_path, source)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stdout + done.stderr
