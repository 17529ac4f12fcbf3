"""Empty libraries in the place of CANN's, so that the wheel of torch-npu loads on a CPU.

Every symbol that the wheel lacks is a function that returns 0. No operator can run, but all of them
are registered with their schemas, and take a CPU kernel.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import torch

SYSTEM = ("libstdc++.so.6", "libm.so.6", "libc.so.6", "libgcc_s.so.1", "libpthread.so.0")
LOADED = ("ld-linux-x86-64.so.2", "libdl.so.2", "librt.so.1")
PYTHON = ("Py", "_Py")


def _output(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True).stdout


def _symbols(path: pathlib.Path, *, undefined: bool) -> set[str]:
    result = set()
    for line in _output("nm", "-D", path).splitlines():
        *_, kind, name = (["", "", *line.split()])[-3:]
        if (kind == "U") if undefined else (kind not in ("U", "w", "v")):
            result.add(name.partition("@")[0])
    return result


def build(wheel: pathlib.Path, into: pathlib.Path) -> None:
    """Build the libraries that the unpacked wheel of torch-npu needs and nobody has."""
    package = wheel / "torch_npu"
    ours = [*package.glob("lib/*.so*"), *package.glob("*.so")]
    ours += package.glob("dynamo/torchair/core/*.so")
    system = [
        pathlib.Path(_output("gcc", f"-print-file-name={n}").strip()) for n in SYSTEM + LOADED
    ]
    torchs = [*pathlib.Path(torch.__file__).parent.glob("lib/*.so*")]
    there = [*ours, *torchs, *system, pathlib.Path(sys.executable)]
    has = set().union(*(_symbols(p, undefined=False) for p in there))
    wants = set().union(*(_symbols(p, undefined=True) for p in ours))
    lacking = sorted(n for n in wants - has if not n.startswith(PYTHON))
    text = "".join(f'.globl "{n}"\n.type "{n}",@function\n"{n}":\n' for n in lacking)
    source = into / "stubs.s"
    source.write_text(
        f'.text\n{text} xorl %eax,%eax\n ret\n.section .note.GNU-stack,"",@progbits\n'
    )
    needed = {
        name
        for p in ours
        for name in re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", p))
        if not name.startswith(("libtorch", "libc10", "libpython", "libgomp"))
    } - {p.name for p in there}
    for name in sorted(needed):
        command = ["gcc", "-shared", "-o", into / name, source, f"-Wl,-soname,{name}"]
        subprocess.run([*map(str, command)], check=True)
        source.write_text('.section .note.GNU-stack,"",@progbits\n')  # the first one has them all
