"""Compile intel_amx's kernels into the wheel, or beside their source where it is editable."""

import importlib.util
import pathlib
import re
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = pathlib.Path(__file__).parent / "src" / "attn_intel" / "cpu"


class CompiledKernels(BuildHookInterface[Any]):
    """Without a compiler the wheel has no kernels, runs anywhere, and intel_amx is not chosen."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform: the kernels bind to no Python and to no torch."""
        spec = importlib.util.spec_from_file_location("build", CPU / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        reason = build.unsupported()
        if reason is not None:
            self.app.display_warning(f"attn-intel: without the kernels of intel_amx: {reason}")
            return
        for old in CPU.glob("kernels-*.so"):
            if old.name != build.name():
                old.unlink()
        library = CPU / build.name()
        if not library.exists():
            self.app.display_info("attn-intel: compiling the kernels of intel_amx")
            build.build(CPU)
        symbols = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
        newest = max(map(int, symbols), default=0)
        system = "manylinux_2_28" if newest <= 28 else "linux"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}_x86_64"
        build_data["artifacts"].append(f"src/attn_intel/cpu/{library.name}")
