"""Run a short part of the device tests under one of NVIDIA's checkers of kernels.

`python tests/device/sanitize.py [--tool TOOL] [NAME ...] [-- PYTEST OPTIONS]`: what the tool finds
ends the run with exit code 1, each fault with the kernel that made it. memcheck, the default, finds
reads and writes out of bounds, racecheck threads of a program that do not wait for one another.
A name is a backend, or `kernels`: every kernel of the Triton backends once (test_kernels.py and
test_linear_kernels.py), in minutes. Parts of that, of the fewest tests that launch every kernel,
are `latent`, `sparse`, `dual-chunk`, `linear` and `prompts`, and parts of these, each of one test,
`latent-decode`, `latent-page-1`, `latent-prompt`, `sparse-cut`, `sparse-decoded`,
`sparse-portable`, `sparse-score`, `sparse-select`, `sparse-write`, `dual-chunk-decode`,
`dual-chunk-prompt` and `dual-chunk-heads`. How long the runs took is printed.

The tests run without the tool first, so that what they compile is compiled already. The tool leaves
out PyTorch's own kernels, of which there are more than of those under test.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence

HERE = pathlib.Path(__file__).parent
CLASSES = {  # backend → its class in test_nvidia.py or test_triton.py
    "fa3": "TestFA3",
    "fa4": "TestFA4",
    "flashinfer": "TestFlashInfer",
    "flashmla": "TestFlashMLA",
    "triton": "TestTriton",
    "trtllm_mha": "TestTrtllmMHA",
}
# Where a kernel may read too far: pages that end, windows, trees, padding.
# the checker refuses to allocate while a graph is captured, so graphs stay out
FEATURES = "page-edges or page-window or verify-tree or verify-chain or padded"
ONCE = "consecutive or interleaved or descending or HND"  # the same again
FOUND = 1  # the checker's exit code for a fault
TORCH = "kns=_ZN2at"  # the mangled names of PyTorch's kernels begin so
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_LINEAR = (
    *("prefill[gdn-bf16]", "prefill[kda-bf16]", "prefill[gdn-fp16]", "prefill[gdn-64-by-256-bf16]"),
    *("decode[gdn-fp32]", "decode[kda-fp32]", "commit[gdn-7-True]", "commit[kda-7-True]"),
)
_LATENT = {  # name → its one test
    "latent-decode": "decode-latent]",
    "latent-page-1": "decode-latent-page-1",
    "latent-prompt": "prompts-latent",
}
_SPARSE = {
    "sparse-cut": "dsa-many-selected-bf16",
    "sparse-decoded": "dsa-decode-fp8-bf16",
    "sparse-portable": "dsa-decode-fp8-fp32",
    "sparse-score": "scores_of_a_prompt",
    "sparse-select": "rows_that_are_selected",
    "sparse-write": "beside_attention",
}
_DUAL_CHUNK = {
    "dual-chunk-decode": "dual-chunk-decode-long",
    "dual-chunk-prompt": "dual-chunk-prefill",
    "dual-chunk-heads": "dual-chunk-sparse-heads",
}
_BOTH = ("test_kernels.py", "test_linear_kernels.py")
KERNELS = {  # name → files, and which tests of theirs
    "kernels": (
        ("test_gathered_pages.py", *_BOTH),
        "test_kernels or test_linear_kernels and not graph or test_gathered_pages",
    ),
    "sparse-pages": (("test_gathered_pages.py",), "test_gathered_pages"),
    "latent": (_BOTH[:1], " or ".join(_LATENT.values())),
    "sparse": (_BOTH[:1], " or ".join(_SPARSE.values())),
    "dual-chunk": (_BOTH[:1], " or ".join(_DUAL_CHUNK.values())),
    "linear": (_BOTH[1:], " or ".join(_LINEAR)),
    "prompts": (_BOTH[:1], "prompts"),
    **{name: (_BOTH[:1], test) for name, test in (_LATENT | _SPARSE | _DUAL_CHUNK).items()},
}
MISSING = (
    "compute-sanitizer is not here: it comes with the CUDA toolkit (bin/ of it belongs on PATH, or "
    "CUDA_HOME names it)"
)


def tool() -> str | None:
    """Return the checker: on PATH, of CUDA_HOME, or of a wheel of NVIDIA's."""
    places = [os.environ.get("PATH", "")]
    if "CUDA_HOME" in os.environ:
        places.append(os.path.join(os.environ["CUDA_HOME"], "bin"))
    nvidia = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
    places += [str(p) for p in nvidia.glob("*/bin")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def tests_of(names: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return the command that runs the tests of some backends and kernels, all where none is named.

    more: options of pytest.
    """
    known = (*CLASSES, *KERNELS)
    unknown = sorted(set(names) - {*known})
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: no such backend (known: {', '.join(known)})")
    requested = names or (*CLASSES, "kernels")
    classes = " or ".join(CLASSES[name] for name in requested if name in CLASSES)
    files = ["test_nvidia.py", "test_triton.py"] * bool(classes)
    parts = [f"({classes}) and ({FEATURES}) and not ({ONCE})"] * bool(classes)
    for name in requested:
        if name in KERNELS:
            own, which = KERNELS[name]
            files += own
            parts.append(which)
    tests = [str(HERE / name) for name in dict.fromkeys(files)]
    return [sys.executable, "-m", "pytest", "-x", *tests, "-k", " or ".join(parts), *more]


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tool", choices=TOOLS, default=TOOLS[0])
    args = parser.parse_args(arguments[:at])
    sanitizer = tool()
    if sanitizer is None:
        print(MISSING, file=sys.stderr)
        return 2
    tests = tests_of(args.names, arguments[at + 1 :])
    if code := timed("without the tool", tests):
        return code
    # each tensor a piece of memory of its own, else what lies past it is another tensor's
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    checker = ["--tool", args.tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    line = [sanitizer, *checker, "--kernel-name-exclude", TORCH, *tests]
    return timed(f"under {args.tool}", line, env)


def timed(what: str, line: Sequence[str], env: dict[str, str] | None = None) -> int:
    """Run a command and say how long it took; return its exit code."""
    start = time.perf_counter()
    code = subprocess.run(line, env=env, check=False).returncode
    print(f"{what}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
