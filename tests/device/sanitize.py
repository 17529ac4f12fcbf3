"""Run a short part of the device tests under NVIDIA's memory checker.

`python tests/device/sanitize.py [BACKEND ...] [-- PYTEST OPTIONS]`: reads and writes out of bounds
end the run with exit code 1, each with the kernel that made it. `kernels`, beside the backends, is
every kernel of the Triton backends once (test_kernels.py and test_linear_kernels.py), in minutes.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
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
FOUND = 1  # the checker's exit code for an error of memory
KERNELS = "kernels"
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


def command(sanitizer: str, backends: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return the command line for some backends or the kernels, all where none is named."""
    known = (*CLASSES, KERNELS)
    unknown = sorted(set(backends) - {*known})
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: no such backend (known: {', '.join(known)})")
    asked = backends or known
    classes = " or ".join(CLASSES[name] for name in asked if name != KERNELS)
    parts = [f"({classes}) and ({FEATURES}) and not ({ONCE})"] * bool(classes)
    parts += ["test_kernels", "test_linear_kernels and not graph"] * (KERNELS in asked)
    checker = ["--tool", "memcheck", "--error-exitcode", str(FOUND), "--target-processes", "all"]
    names = ["test_nvidia.py", "test_triton.py"] * bool(classes)
    names += ["test_kernels.py", "test_linear_kernels.py"] * (KERNELS in asked)
    tests = [str(HERE / name) for name in names]
    chosen = " or ".join(parts)
    return [sanitizer, *checker, sys.executable, "-m", "pytest", "-x", *tests, "-k", chosen, *more]


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    sanitizer = tool()
    if sanitizer is None:
        print(MISSING, file=sys.stderr)
        return 2
    # each tensor a piece of memory of its own, else what lies past it is another tensor's
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        command(sanitizer, arguments[:at], arguments[at + 1 :]), env=env, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
