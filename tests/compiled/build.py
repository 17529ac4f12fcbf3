"""Compile what our launchers launch for a GPU that is not here; prints one JSON line a kernel.

Usage: python build.py TARGET [SITE …], a TARGET such as sm90 or gfx942. Not for an interpreter: a
kernel that was decorated for it cannot be compiled.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import torch
import triton
from sites import SITES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def target_of(arch):
    """Return Triton's target of "sm90" or "gfx942"."""
    if arch.startswith("sm"):
        return GPUTarget("cuda", int(arch[2:]), 32)
    return GPUTarget("hip", arch, 64)


class StandIn:
    """What compiling asks a driver for."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")


def facts(kernel):
    """Return what a compiled kernel takes: bytes of shared memory, registers and spilled bytes."""
    text = kernel.asm.get("amdgcn")
    if text is not None:
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text))
        [registers] = re.findall(r"\.vgpr_count:\s+(\d+)", text)
        return {"registers": int(registers), "spilled": 4 * spills}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}


def main(arch, names):
    """Run the launchers and print what was compiled."""
    driver.set_active(StandIn(target_of(arch)))
    run, launched = JITFunction.run, []

    def compiled(self, *args, grid, warmup, **more):
        # a tensor on the device "meta" has the address 0, which is as well aligned as any
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        launched.append((self.__name__, kernel))

    JITFunction.run = compiled
    for name in names or SITES:
        launched.clear()
        start = time.perf_counter()
        error = None
        try:
            SITES[name](arch)
        except Exception as caught:  # whatever a compiler raises is the finding
            error = f"{type(caught).__name__}: {caught}"
        for kernel, made in dict(launched).items():
            line = {"site": name, "kernel": kernel, "shared": made.metadata.shared}
            print(json.dumps(line | facts(made)), flush=True)
        seconds = round(time.perf_counter() - start, 1)
        line = {"site": name, "seconds": seconds, "error": error, "launches": len(launched)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
