"""How a kernel is compiled."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WaveCompileOptions:
    canonicalize: bool = True
    subs: dict[str, Any] = field(default_factory=list)
    dynamic_symbols: list[str] = field(default_factory=list)
    device: str = "hip"
    target: str = "gfx942"
    denorm_fp_math_f32: str = None
    waves_per_eu: int = None
    wave_runtime: bool = False
    use_buffer_ops: bool = False
