"""Launch a kernel again without Triton's binding, specialisation and lookup of its arguments.

They take most of the host's time of a launch. benchmarks/results/overhead.*.json has what is left.
"""

from __future__ import annotations

import importlib
import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

Grid = tuple[int, int, int]
# (grid, stream, launch metadata, hooks before and after, arguments with the constants)
_Run = Callable[[Grid, int, Any, Any, Any, tuple[Any, ...]], None]


class Launcher:
    """One kernel with constants and options, for arguments that Triton specialises alike.

    kernel: a Triton or Gluon function whose constants come last. The first launch compiles it; the
    others hand their arguments to what was compiled, as `CompiledKernel[grid]` does. Hooks of
    profilers are called. The owner keeps a launcher for each key of all that Triton looks at:
    constants, and of each argument that it specialises what is `alike`, or the number itself.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options", "_run")

    def __init__(self, kernel: Any, *constants: Any, **options: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._compiled: CompiledKernel | None = None
        self._run: _Run | None = None

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch it on the current device and stream."""
        compiled = self._compiled
        if compiled is None:
            compiled = self.by_triton(grid, *args)
            if isinstance(compiled, CompiledKernel):  # None in Triton's interpreter
                self._compiled = compiled
            return
        run = self._run
        if run is None:
            run = self._run = _direct(compiled) or _through(compiled)
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        arguments = (*args, *self._constants)
        enter, leave, metadata = _hook("launch_enter_hook"), _hook("launch_exit_hook"), None
        if enter is not None:
            metadata = compiled.launch_metadata(grid, stream, *arguments)
        run(grid, stream, metadata, enter, leave, arguments)

    def by_triton(self, grid: Grid, *args: Any) -> Any:
        """Launch it as plain Triton does, and return what that returns."""
        return self._kernel[grid](*args, *self._constants, **self._options)


def alike(x: Tensor) -> Hashable:
    """Return what Triton specialises of a tensor: its dtype, and how its address is aligned.

    On AMD's GPUs 32-bit offsets are compiled for storages of less than 2 GiB.
    """
    if _ON_AMD:
        return x.dtype, x.data_ptr() % 16, x.untyped_storage().size() >> 31 > 0
    return x.dtype, x.data_ptr() % 16


def numbered(key: Hashable) -> int:
    """Return a number that is equal for equal keys: long keys are hashed once, not in each call."""
    return _NUMBERS.setdefault(key, next(_COUNT))


_ON_AMD = torch.version.hip is not None
_NUMBERS: dict[Hashable, int] = {}
_COUNT = itertools.count()  # threads never draw the same number


def _hook(name: str) -> Any:
    """Return what a profiler hooked in; None where Triton's chain of hooks is empty."""
    hook = getattr(knobs.runtime, name)
    return hook if getattr(hook, "calls", True) else None


def _through(compiled: CompiledKernel) -> _Run:
    """Return a launch by the launcher of a compiled kernel, as every Triton has it."""

    def run(
        grid: Grid, stream: int, metadata: Any, enter: Any, leave: Any, args: tuple[Any, ...]
    ) -> None:
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(*grid, stream, function, packed, metadata, enter, leave, *args)

    return run


def _direct(compiled: CompiledKernel) -> _Run | None:
    """Return a launch by the C function below an NVIDIA launcher of Triton 3.6; None elsewhere.

    The launcher encodes every tensor map anew, half of its time. Here a map is kept as long as its
    descriptor is the same object over the same address. Descriptors lie side by side.
    """
    launcher = compiled.run
    sizes = (getattr(launcher, f"{x}_scratch_size", None) for x in ("global", "profile"))
    if triton.__version__[:4] != "3.6." or any(size != 0 for size in sizes):
        return None
    inner = launcher.launch
    cells = getattr(inner, "__closure__", None) or ()
    inside = dict(zip(inner.__code__.co_freevars, cells, strict=True)) if cells else {}
    c_function, indices, formats = inner, [], []
    if "tensordesc_indices" in inside:  # of the closure that encodes maps
        c_function = inside["launcher"].cell_contents
        indices = sorted(inside["tensordesc_indices"].cell_contents)
        formats = inside["tensordesc_meta"].cell_contents
    first, end = (indices[0], indices[-1] + 1) if indices else (0, 0)
    if end - first != len(indices):
        return None
    make_map = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    function, packed = compiled.function, compiled.packed_metadata
    # of descriptors without their tensors: one of a pass's queries must not keep them
    kept: list[tuple[Any, int, list[Any]]] = [(lambda: None, 0, [])] * len(indices)

    def maps(descriptors: tuple[Any, ...]) -> list[Any]:
        expanded: list[Any] = []
        for i, descriptor in enumerate(descriptors):
            old, address, arguments = kept[i]
            if old() is not descriptor or address != descriptor.base.data_ptr():
                arguments = make_map(descriptor, formats[i])
                kept[i] = (weakref.ref(descriptor), descriptor.base.data_ptr(), arguments)
            expanded += arguments
        return expanded

    def run(
        grid: Grid, stream: int, metadata: Any, enter: Any, leave: Any, args: tuple[Any, ...]
    ) -> None:
        if indices:
            args = (*args[:first], *maps(args[first:end]), *args[end:])
        c_function(*grid, stream, function, *flags, packed, metadata, enter, leave, *args)

    return run
