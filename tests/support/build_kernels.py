"""Compile what our launchers launch for a GPU that is not here; prints one JSON line a site.

Usage: python build_kernels.py TARGET GROUP or SITE … [--digest], a TARGET such as sm90 or gfx942.
The groups and sites are those of launch_sites.py. A process of its own, since a kernel that was
decorated for the interpreter cannot be compiled.

With --digest each kernel has a digest of its instructions and no time is printed: run it in two
checkouts and `diff` the lines to see whether an edit changed the code that runs.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import shared_memory
import torch
import triton
from launch_site import NotDeclared, described
from launch_sites import GROUPS, LINEAR, SITES, chip
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PRODUCTS = re.compile(
    r"tcgen05\.mma|wgmma\.mma_async|mma\.sync\.aligned\.m\d+n\d+k\d+|v_mfma_f32_\d+x\d+x\d+"
)
# between the wait for all products but one and the wait for that one
BESIDE = re.compile(r"DEPBAR\.LE gsb0, 0x1 ;(.*?)DEPBAR\.LE gsb0, 0x0 ;", re.DOTALL)
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


def disassembled(kernel):
    """Return what cuobjdump says of an NVIDIA kernel: its resources and its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-sass", "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(kernel):
    """Return a kernel's instructions, a line each, without names and offsets of parameters.

    What is left out depends on how a kernel and its parameters are named and laid out: encodings,
    labels of functions, lines of source, offsets into the constant bank or the kernel's arguments.
    """
    text = kernel.asm.get("amdgcn")
    if text is None:
        lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.+?;)", disassembled(kernel), re.MULTILINE)
        return [re.sub(r"c\[0x0\]\[(?:[^]]*)0x[0-9a-f]+\]", "c[0x0][param]", x) for x in lines]
    text = text.split(".section", 1)[0]
    lines = [line.partition(";")[0].strip() for line in text.splitlines()]
    # directives (.loc among them) and labels that are not jumped to
    lines = [x for x in lines if x and not re.match(r"\.(?!LBB)|\.?L?(?:tmp|func)|\w+:$", x)]
    arguments = re.compile(r"(s_load_\S+ \S+ s\[\d+:\d+\], )(?:0x[0-9a-f]+|\d+)")
    return [arguments.sub(r"\1param", x) for x in lines]


def digest(kernel):
    """Return a digest of a kernel's instructions and how many they are."""
    lines = instructions(kernel)
    text = "\n".join(lines).encode()
    return {"digest": hashlib.sha256(text).hexdigest()[:16], "instructions": len(lines)}


def facts(kernel):
    """Return shared memory in bytes, the registers of a thread, its spills, matrix instructions.

    A spill of an NVIDIA kernel is an instruction: a stack alone may be that of a called division.
    serialized: products of warp groups wait one for the other, for want of registers. beside: how
    many maxima and exponentials run beside a product, in each loop that has one under way.
    """
    text, serialized, beside = kernel.asm.get("amdgcn"), False, []
    if text is not None:
        [registers] = re.findall(r"\.vgpr_count:\s+(\d+)", text)
        [spills] = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    else:
        text = disassembled(kernel)
        [registers] = re.findall(r"REG:(\d+)", text)
        spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
        products, waits = (len(re.findall(x, text)) for x in ("[HQ]GMMA", "WARPGROUP.DEPBAR"))
        serialized = 2 * waits > products
        beside = [[x.count(name) for name in ("FMNMX", "MUFU.EX2")] for x in BESIDE.findall(text)]
    assembly = kernel.asm.get("amdgcn") or kernel.asm["ptx"]
    shared = kernel.metadata.shared
    return {
        "shared": shared,
        "registers": int(registers),
        "spills": int(spills),
        "serialized": serialized,
        "beside": beside,
        "products": sorted({*PRODUCTS.findall(assembly)}),
    }


def overwritten(function, kernel):
    """Return what a Gluon kernel writes too early; Triton waits by itself, with the factors."""
    return shared_memory.findings(kernel.asm["ttgir"]) if function.is_gluon() else []


def specialised(function, args):
    """Return the numbers among arguments of which Triton compiles 1 and multiples of 16 apart."""
    free = [x.is_constexpr or x.do_not_specialize for x in function.params]
    named = zip(function.params, args, free, strict=False)
    return [param.name for param, arg, skipped in named if type(arg) is int and not skipped]


def main(arch, names, *, digests=False):
    """Run the launchers and print what was compiled."""
    driver.set_active(StandIn(target_of(arch)))
    run, launched = JITFunction.run, {}

    def compiled(self, *args, grid, warmup, **more):
        # a tensor on the device "meta" has the address 0, which is as well aligned as any
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        launched[id(kernel)] = (self, kernel, specialised(self, args))

    JITFunction.run = compiled
    for site in dict.fromkeys(s for name in names for s in GROUPS.get(name, [name])):
        launched.clear()
        start, result = time.perf_counter(), described(site, SITES[site])
        try:
            SITES[site](chip(arch, "linear" if site in LINEAR else "softmax"))
        except NotDeclared as reason:
            result["not_declared"] = str(reason)
        except Exception as error:  # whatever a compiler raises is the finding
            result["error"] = f"{type(error).__name__}: {error}"
        if not digests:
            result["seconds"] = round(time.perf_counter() - start, 1)
        result["kernels"] = [
            {"name": function.__name__, "specialised": numbers}
            | facts(kernel)
            | {"overwritten": overwritten(function, kernel)}
            | (digest(kernel) if digests else {})
            for function, kernel, numbers in launched.values()
        ]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    arguments = [x for x in sys.argv[1:] if x != "--digest"]
    main(arguments[0], arguments[1:], digests="--digest" in sys.argv)
