"""Compile what a template has made; here it is a function already."""

from .compile_options import WaveCompileOptions as WaveCompileOptions


def wave_compile(options, kernel, schedule=None):
    assert schedule is None, "not emulated"
    assert options.wave_runtime, "IREE's runtime synchronises: not emulated"
    assert options.target.startswith("gfx9"), f"{options.target} has no such instructions"
    assert "READ_SHARED_DELAY" in options.subs, "the scheduler's parameters are missing"
    assert options.dynamic_symbols == kernel.dynamic, "a size of the first call is compiled in"
    assert kernel.symbols.items() <= options.subs.items()
    return kernel
