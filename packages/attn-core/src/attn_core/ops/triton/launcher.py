"""Launch a kernel again without Triton's binding, specialisation and lookup of its arguments.

They take most of the host's time of a launch. benchmarks/results/overhead.*.json has what is left.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from attn_core.ops.forms import numbered as numbered

Grid = tuple[int, int, int]
Tensors = tuple[Any, ...] | Callable[[], tuple[Any, ...]]


class Arguments:
    """Arguments that many launches share: as Triton takes them, and with addresses of tensors.

    They are turned into addresses once. It holds the tensors, so that no address outlives its
    tensor.
    """

    __slots__ = ("addresses", "values")

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.addresses: tuple[Any, ...] = _addresses(values)

    def between(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> Arguments:
        """Return these between others; only the others are turned into addresses."""
        whole = Arguments.__new__(Arguments)
        whole.values = (*before, *self.values, *after)
        whole.addresses = (*_addresses(before), *self.addresses, *_addresses(after))
        return whole


class Launcher:
    """One kernel with its last arguments and options, for others that Triton specialises alike.

    kernel: a Triton or Gluon function.
    last: the arguments that never change: tensors, descriptors and numbers of a layer and its
    cache, and constants.

    The first launch compiles the kernel; the others hand their arguments to what was compiled, as
    `CompiledKernel[grid]` does. With Triton 3.6 on NVIDIA they are addresses and encoded tensor
    maps; those of `last` are found once, so the owner drops the launcher when a tensor has moved.
    Hooks of profilers are called, with tensors. The owner keeps a launcher for each key of all that
    Triton looks at: constants, and of each argument that it specialises what is `alike`, or the
    number itself.
    """

    __slots__ = ("_compiled", "_direct", "_kernel", "_last", "_options")

    def __init__(self, kernel: Any, *last: Any, **options: Any) -> None:
        self._kernel = kernel
        self._last = last
        self._options = options
        self._compiled: CompiledKernel | None = None
        self._direct: _Direct | None = None

    def launch(
        self,
        grid: Grid,
        args: tuple[Any, ...],
        tensors: Tensors | None = None,
        shared: Iterable[Any] = (),
    ) -> None:
        """Launch it on the current device and stream.

        args: the first ones. With `tensors`, addresses are in place of tensors, and MapOf in place
        of descriptors.
        tensors: the same with tensors and descriptors, or what returns them.
        shared: further ones, after those in `tensors`.
        """
        direct, runtime = self._direct, knobs.runtime
        try:  # _hooked() is a call more
            hooked = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        except AttributeError:
            hooked = _hooked()
        if hooked or direct is None:
            self._launch(grid, _first(args, tensors, shared))
            return
        run, head, last, maps, device, stream = direct
        if maps:
            args = _encoded(args, maps)
        run(*grid, stream(device()), *head, *args, *last)

    def by_triton(
        self,
        grid: Grid,
        args: tuple[Any, ...],
        tensors: Tensors | None = None,
        shared: Iterable[Any] = (),
    ) -> Any:
        """Launch it as plain Triton does, and return what that returns."""
        return self._kernel[grid](*_first(args, tensors, shared), *self._last, **self._options)

    def _launch(self, grid: Grid, first: tuple[Any, ...]) -> None:
        """Launch it with tensors: for the first time, under a hook, or on another Triton."""
        compiled = self._compiled
        if compiled is None:
            compiled = self.by_triton(grid, first)
            if isinstance(compiled, CompiledKernel):  # None in Triton's interpreter
                self._compiled = compiled
                self._direct = _direct(compiled, len(first), self._last)
            return
        active, runtime = driver.active, knobs.runtime
        stream = active.get_current_stream(active.get_current_device())
        values = (*first, *self._last)
        enter, leave = _hook(runtime.launch_enter_hook), _hook(runtime.launch_exit_hook)
        metadata = None if enter is None else compiled.launch_metadata(grid, stream, *values)
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(*grid, stream, function, packed, metadata, enter, leave, *values)


def alike(x: Tensor, address: int | None = None) -> Hashable:
    """Return what a launch is compiled for of a tensor: its dtype, and how its address is aligned.

    A tensor of the host has another key: its first launch raises Triton's error. On AMD's GPUs
    32-bit offsets are compiled for storages of less than 2 GiB.
    address: of the tensor, if it was asked for already.
    """
    aligned = (x.data_ptr() if address is None else address) % 16
    if _ON_AMD:
        return x.dtype, aligned, x.is_cuda, x.untyped_storage().size() >> 31 > 0
    return x.dtype, aligned, x.is_cuda


def alike_number(n: int) -> Hashable:
    """Return what a launch is compiled for of a number: 1, a multiple of 16, or its 64 bits."""
    return n == 1, n % 16 == 0, n >> 31


Pointers = tuple[tuple[Callable[[], int], int], ...]


def pointers(*tensors: Tensor | None) -> Pointers:
    """Return where tensors lie, for `moved`; None is left out."""
    return tuple((x.data_ptr, x.data_ptr()) for x in tensors if x is not None)


def moved(old: Pointers) -> bool:
    """Say whether one of the tensors lies at another address now."""
    for data_ptr, address in old:  # noqa: SIM110  # any() takes twice as long
        if data_ptr() != address:
            return True
    return False


_ON_AMD = torch.version.hip is not None


def _first(
    args: tuple[Any, ...], tensors: Tensors | None, shared: Iterable[Any]
) -> tuple[Any, ...]:
    """Return the first arguments with tensors."""
    if tensors is None:
        return args
    return (*(tensors() if callable(tensors) else tensors), *shared)


def _hooked() -> bool:
    """Say whether a profiler hooked in. Triton's chains of hooks may be empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a function or None in place of a chain
        return _hook(enter) is not None or _hook(leave) is not None


def _hook(hook: Any) -> Any:
    """Return a hook, None for an empty chain."""
    return hook if getattr(hook, "calls", True) else None


def _addresses(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with addresses in place of tensors, also within tuples."""
    return tuple(
        x.data_ptr() if isinstance(x, Tensor) else _addresses(x) if isinstance(x, tuple) else x
        for x in values
    )


Maps = Sequence[tuple[int, Callable[[Any], list[Any]]]]
_MAPS = 256  # of one launcher: its queries lie at few addresses


class _Direct(NamedTuple):
    """The C function below an NVIDIA launcher of Triton 3.6, with what all its calls are given.

    run: takes grid, stream, head, first and last arguments.
    maps: positions of descriptors among the first arguments, from the last one on, and what encodes
    each.
    device: returns the current device. stream: returns the current stream of a device.
    """

    run: Callable[..., object]
    head: tuple[Any, ...]
    last: tuple[Any, ...]
    maps: Maps
    device: Callable[[], int]
    stream: Callable[[int], int]


class MapOf(NamedTuple):
    """A TMA descriptor's tensor: its address, the shape and the strides in elements.

    Its block, dtype and swizzle are those of the descriptor that the launcher was compiled for.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _encoder(make_map: Callable[..., list[Any]], form: Any) -> Callable[[MapOf], list[Any]]:
    """Return what encodes tensor maps, which are nothing but numbers: it keeps the last ones.

    make_map: Triton's own. form: the descriptor that a kernel was compiled for.
    """

    @functools.lru_cache(_MAPS)
    def encode(tensor_map: MapOf) -> list[Any]:
        base = SimpleNamespace(data_ptr=lambda: tensor_map.address)
        descriptor = SimpleNamespace(
            base=base, shape=tensor_map.shape, strides=tensor_map.strides, padding="zero"
        )
        return make_map(descriptor, form)

    return encode


def _encoded(args: Sequence[Any], maps: Maps) -> tuple[Any, ...]:
    """Return arguments with tensor maps in place of their descriptors."""
    encoded = list(args)
    for i, encode in maps:
        encoded[i : i + 1] = encode(encoded[i])
    return tuple(encoded)


def _current_device() -> Callable[[], int]:
    """Return what tells the current device of the driver, once CUDA is initialised."""
    get_device: Callable[[], int] = driver.active.get_current_device
    if get_device is torch.cuda.current_device:  # asks each time whether CUDA is initialised
        get_device = getattr(torch._C, "_cuda_getDevice", get_device)
    return get_device


def _direct(compiled: CompiledKernel, count: int, last: Sequence[Any]) -> _Direct | None:
    """Return how the C function is called; None on another Triton.

    count: of the first arguments.
    """
    launcher = compiled.run
    sizes = (getattr(launcher, f"{x}_scratch_size", None) for x in ("global", "profile"))
    if triton.__version__[:4] != "3.6." or any(size != 0 for size in sizes):
        return None
    run, call_maps, last_maps = launcher.launch, [], []
    cells = getattr(run, "__closure__", None) or ()
    closure = dict(zip(run.__code__.co_freevars, cells, strict=True)) if cells else {}
    if "tensordesc_indices" in closure:  # of the closure that encodes maps
        run = closure["launcher"].cell_contents
        make_map = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
        indices = sorted(closure["tensordesc_indices"].cell_contents)
        forms = closure["tensordesc_meta"].cell_contents
        for i, form in reversed([*zip(indices, forms, strict=True)]):
            if i < count:
                call_maps.append((i, _encoder(make_map, form)))
            else:
                last_maps.append((i - count, functools.partial(make_map, metadata=form)))
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return _Direct(
        run,
        (compiled.function, *flags, compiled.packed_metadata, None, None, None),
        _encoded(_addresses(last), last_maps),
        call_maps,
        _current_device(),
        driver.active.get_current_stream,
    )
