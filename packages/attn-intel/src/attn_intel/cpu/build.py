"""Compile the kernels, in the user's cache or for the wheel, and find them."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

KERNELS: Final = "attn-intel-kernels"  # as rows require them
COMMAND: Final = "python -m attn_intel.cpu"
COMPILERS: Final = ("cc", "gcc", "clang")
NEWEST: Final = "GCC 11 or newer, or clang 12 or newer"
SOURCE: Final = pathlib.Path(__file__).parent / "source"
FLAGS: Final = (
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
AVX512: Final = (
    *(*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    "-mprefer-vector-width=512",
)
LEVELS: Final = {  # attend.c is compiled once for each, and one is chosen when it runs
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx_bf16": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


def name() -> str:
    """Return the library's file name, which changes with its source and with the flags."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))
    text += repr((FLAGS, LEVELS)).encode()
    return f"kernels-{hashlib.sha256(text).hexdigest()[:12]}.so"


def cache() -> pathlib.Path | None:
    """Return the user's folder for compiled kernels, None where there is no home folder.

    It is in XDG_CACHE_HOME, where that is absolute, else in ~/.cache.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "attn-intel" if os.path.isabs(root) else None


def compiled_library() -> pathlib.Path | None:
    """Return the compiled library, or None where this source was not compiled.

    It may lie in the package, where the wheel has it, or in the cache, where nobody but this user
    and root can have written it, loading it runs its code, and where code may be run.
    """
    file, folder = name(), cache()
    if (SOURCE.parent / file).is_file():
        return SOURCE.parent / file
    if folder is None or not os.path.isfile(folder / file) or distrusted(folder / file):
        return None
    return folder / file


def distrusted(library: pathlib.Path) -> str | None:
    """Say why a library in the cache is not loaded: who else may have written it; None: it is."""
    try:
        sealed = os.statvfs(library.parent).f_flag & getattr(os, "ST_NOEXEC", 0)
    except OSError as error:
        return str(error)
    if sealed:
        return (
            f"{library.parent} is on a file system that runs no code (mounted noexec); set "
            "XDG_CACHE_HOME to a folder on another"
        )
    for path in (library.parent, library):
        try:
            status = path.stat()
        except OSError as error:
            return str(error)
        if status.st_uid not in (0, os.geteuid()):
            return (
                f"{path} belongs to user {status.st_uid}; set XDG_CACHE_HOME to a folder of yours"
            )
        if status.st_mode & 0o022:
            return f"other users can write {path}; run `chmod go-w {path}`"
    return None


def compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: $CC, else cc, gcc or clang; empty: it is not there."""
    command = shlex.split(os.environ.get("CC", ""))
    paths = (shutil.which(name) for name in (command[:1] or COMPILERS))
    return next(((path, *command[1:]) for path in paths if path), ())


def unsupported() -> str | None:
    """Say why the kernels cannot be compiled on this machine; None: they can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the kernels are for x86-64 Linux, this is {platform.machine()} {sys.platform}"
    if compiler():
        return None
    asked = os.environ.get("CC", "").strip()
    lacking = f"CC is {asked!r}, which is not found" if asked else "there is no C compiler"
    return f"{lacking}: install {NEWEST}, or set CC"


def build(folder: pathlib.Path) -> pathlib.Path:
    """Compile the library into `folder`, whole or not at all. Raises RuntimeError."""
    if (reason := unsupported()) is not None:
        raise RuntimeError(reason)
    cc = compiler()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / name()
    with tempfile.TemporaryDirectory(dir=folder) as part:
        whole = pathlib.Path(part) / target.name
        jobs = [(*flags, f"-DLEVEL={x}", f"-DLEVEL_NUMBER={i}", "attend.c", x)
                for i, (x, flags) in enumerate(LEVELS.items())]  # fmt: skip
        jobs.append(("dispatch.c", "dispatch"))
        objects = [f"{part}/{job[-1]}.o" for job in jobs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                (*cc, *FLAGS, "-c", *job[:-1], "-o", to)
                for job, to in zip(jobs, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        _run((*cc, "-shared", "-o", str(whole), *objects, "-lm"))
        whole.chmod(0o755)  # whatever the umask allows to others, see `distrusted`
        whole.replace(target)
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}\n{done.stderr}attn-intel needs {NEWEST}; set CC to one of them"
        )
