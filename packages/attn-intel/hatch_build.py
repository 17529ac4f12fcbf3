"""Compile intel_amx's kernels into the wheel, or beside their source where it is editable."""

import importlib.util
import pathlib
import re
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = pathlib.Path(__file__).parent / "src" / "attn_intel" / "cpu"


def _system(library: bytes) -> str:
    """Return the platform of the wheel: manylinux where the C library's symbols are old enough."""
    symbols = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    # without any it is another C library's; packed relocations need glibc 2.36 without a symbol
    old = symbols and max(symbols) <= 28 and b"GLIBC_ABI_DT_RELR" not in library
    return "manylinux_2_28" if old else "linux"


class CompiledKernels(BuildHookInterface[Any]):
    """Without a compiler the wheel has no kernels, runs anywhere, and intel_amx is not chosen."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform: the kernels bind to no Python and to no torch."""
        spec = importlib.util.spec_from_file_location("build", CPU / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        library = CPU / build.name()
        for old in CPU.glob("kernels-*.so"):
            if old.name != library.name:
                old.unlink()
        try:
            if build.unsupported() or not library.exists():
                self.app.display_info("attn-intel: compiling the kernels of intel_amx")
                build.build(CPU)
        except (RuntimeError, OSError) as error:  # another machine, no compiler, an old one
            self.app.display_warning(f"attn-intel: without the kernels of intel_amx: {error}")
            return
        system = _system(library.read_bytes())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}_x86_64"
        build_data["artifacts"].append(f"src/attn_intel/cpu/{library.name}")
