"""Compile the kernels that fa4's rows use, through the backend, for a GPU that is not here.

Usage: python build_fa4.py sm90|sm100 [WORD …] prints one JSON line per site whose name holds a
WORD, all of them by default. Needs flash-attn-4, nvidia-cutlass-dsl, quack-kernels, triton and a C
compiler; torch may be the CPU's: tensors are fake, and so is the driver (fake_libcuda.c).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import torch
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.kinds import Phase
from attn_core.testing.cases import Case, RaggedCase
from launch_site import Chip, NotDeclared, Site, described
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = pathlib.Path(__file__).parent
WHEELS = HERE.parent / "contracts" / "wheels.txt"  # the versions that are emulated
CHIPS = {"sm90": ("sm_90", "sm_90a", "90"), "sm100": ("sm_100", "sm_100a", "100")}


@contextmanager
def fake_driver():
    """Build the driver that has no device; a process finds it by LD_LIBRARY_PATH at its start."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-w", "-o", library, str(HERE / "fake_libcuda.c")]
        subprocess.run(command, check=True)
        yield folder


def again(arch, words):
    """Run this script in a process that compiles for `arch`."""
    kernels, target, capability = CHIPS[arch]
    with fake_driver() as folder:
        env = os.environ | {
            "FLASH_ATTENTION_ARCH": kernels,
            "CUTE_DSL_ARCH": target,
            "FAKE_CC": capability,
            "LD_LIBRARY_PATH": folder,
            "ATTN_COMPILING": arch,
        }
        done = subprocess.run([sys.executable, __file__, arch, *words], env=env)
    sys.exit(done.returncode)


def decode(**more):
    return Site(case=replace(_PASS, mode=ForwardMode.DECODE, query_lens=(1, 1), **more), **PAGES)


def extend(**more):
    return Site(case=replace(_PASS, **more), **PAGES)


def latent(heads, **more):
    shape = {"kind": "mla", "heads": (heads, 1), "dims": (576, 512)}
    return Site(case=replace(_PASS, **shape, **more), page_size=1)


def ragged(dims, heads=(3, 3), **more):
    lens = {"query_lens": (3, 3), "key_lens": (5, 4)}
    return Site(case=RaggedCase(feature="", heads=heads, dims=dims, **lens, **more))


PAGES = {"page_size": 128}
_PASS = Case(feature="", query_lens=(3, 3), seq_lens=(300, 9), heads=(8, 2), dims=(128, 128))
VISION, WIDE = {"phase": Phase.ENCODE}, {"kind": "mla", "heads": (4, 4)}
SITES = {
    "paged-128": extend(),
    "paged-128-without-lse": replace(decode(), lse=False),
    "paged-128-chain": extend(mode=ForwardMode.TARGET_VERIFY),
    "paged-64-window-sinks": extend(dims=(64, 64), window=9, sinks=True),
    "paged-80-softcap": extend(dims=(80, 80), logit_cap=3.0),
    "paged-96-window": extend(dims=(96, 96), window=9),
    "paged-192-128": extend(dims=(192, 128)),
    "paged-cross": extend(encoder_lens=(130, 20)),
    "paged-128-group-7": extend(heads=(14, 2)),
    "paged-64-group-5": extend(dims=(64, 64), heads=(10, 2)),
    "paged-mha": extend(heads=(4, 4)),
    "ragged-encoder-128": ragged((128, 128), (8, 2)),
    "ragged-causal-128": ragged((128, 128), (8, 2), causal=True),
    **{f"ragged-vision-{d}": ragged((d, d), **VISION) for d in (72, 80, 256)},
    **{f"paged-{d}-every": extend(dims=(d, d), window=9) for d in range(16, 129, 16)},
    "mla-absorbed": latent(16),
    "mla-absorbed-128-heads": latent(128),
    "mla-ragged": ragged((192, 128), causal=True, **WIDE),
    "mla-ragged-prefix": ragged((192, 128), **WIDE),
}


def chip(arch):
    """Return a chip, "sm90" or "sm100", with tensors that are fake."""
    [pin] = [line for line in WHEELS.read_text().split() if line.startswith("flash-attn-4==")]
    return Chip(
        spec=load_plugins().get("fa4"),
        arch=arch,
        libraries={"flash-attn-4": pin.partition("==")[2]},
        on=torch.device("cuda"),
        tensors=FakeTensorMode,
    )


def main(arch, words):
    """Run the sites and print what became of each."""
    where = chip(arch)
    for name, site in SITES.items():
        if words and not any(w in name for w in words):
            continue
        start, line = time.perf_counter(), described(name, site) | {"arch": arch}
        try:
            site(where)
        except NotDeclared as reason:
            line["not_declared"] = str(reason)
        except Exception as error:  # whatever a compiler says is the finding
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        line["seconds"] = round(time.perf_counter() - start, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    arch, *words = sys.argv[1:]
    if os.environ.get("ATTN_COMPILING") != arch:
        again(arch, words)
    warnings.simplefilter("ignore")
    main(arch, words)
