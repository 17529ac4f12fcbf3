"""Launches on a GPU that is not here: what Triton would compile, and what a launcher repeats.

A kernel is neither compiled nor run. Triton's own binder says what each launch is specialised for.
"""

import dataclasses
from contextlib import contextmanager
from unittest import mock

import torch
from attn_core.ops.triton import launcher as module
from attn_core.ops.triton.launcher import Arguments, Launcher, MapOf
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class _Driver:
    """A driver of one or several GPUs of sm90. device: the current one. stream: its current one."""

    def __init__(self):
        self.device = self.stream = 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 1000 * (device + 1) + self.stream


@dataclasses.dataclass
class Launched:
    """One launch: the kernel, whether Triton bound its arguments, and where it was queued.

    addresses: of tensors, and all other numbers that it was given.
    """

    name: str
    slow: bool
    stream: int
    addresses: frozenset[object]


class Launches(list):
    """All launches in order. driver: the current device and stream are its attributes."""

    def __init__(self):
        self.driver = _Driver()

    def names(self, *, slow):
        """Return the kernels that were launched in this way, and forget all launches."""
        result = [x.name for x in self if x.slow is slow]
        self.clear()
        return result


def _name(kernel):
    return kernel.fn.__name__


_BINDERS = {}


def _binder(kernel):
    """Return Triton's binder of a kernel, also of one that was decorated for the interpreter."""
    known = _BINDERS.get(id(kernel))  # its hash is that of its source and all that this calls
    if known is None:
        of = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        known = _BINDERS[id(kernel)] = (of.create_binder()[-1], kernel)
    return known[0]


def specialisation(kernel, args, options):
    """Return what Triton compiles a kernel for, given these arguments: types, hints, constants."""
    return repr(_binder(kernel)(*args, **options)[1])


def _flat(x):
    """Return an argument with addresses in place of tensors and descriptors."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, MapOf):
        return tuple(x)
    if isinstance(x, tuple):
        return tuple(map(_flat, x))
    if hasattr(x, "base"):  # a descriptor
        return x.base.data_ptr(), tuple(x.shape), tuple(x.strides)
    return x


def _leaves(x):
    """Yield the numbers and addresses in an argument."""
    x = _flat(x)
    if isinstance(x, tuple):
        for part in x:
            yield from _leaves(part)
    else:
        yield x


@contextmanager
def recorded_launches():
    """Record launches, each of which is checked.

    A launcher's later launches must be those for which its kernel was compiled at the first one,
    and the addresses that they are given those of the tensors that a first launch would be given.
    """
    launches, first = Launches(), {}
    driver = launches.driver

    def run(kernel, *args, grid, warmup, **options):
        device = driver.get_current_device()
        stream = driver.get_current_stream(device)
        launches.append(Launched(_name(kernel), True, stream, frozenset(_leaves(args))))

        def c_function(x, y, z, stream, *rest):
            launches.append(Launched(_name(kernel), False, stream, frozenset(_leaves(rest))))

        def public(x, y, z, stream, function, packed, metadata, enter, leave, *values):
            c_function(x, y, z, stream, *values)

        compiled = CompiledKernel.__new__(CompiledKernel)
        compiled.function, compiled.packed_metadata = 17, "packed"
        # called in the public way by a thread that comes while another one makes the launcher
        ways = {"launch": staticmethod(c_function), "__call__": lambda self, *args: public(*args)}
        compiled._run = type("Cuda", (), ways)()
        for name in ("global_scratch_size", "profile_scratch_size"):
            setattr(compiled._run, name, 0)
        compiled._run.launch_cooperative_grid = compiled._run.launch_pdl = False
        return compiled

    launch = Launcher.launch

    def checked(self, grid, args, tensors=None, shared=()):
        with _disable_current_modes():  # operators here are none of a call
            kwargs = module._first(args, tensors, shared)
        of = specialisation(self._kernel, (*kwargs, *self._last), self._options)
        known = first.setdefault(id(self), (self, of))[1]  # held, so that the id stays its own
        name = _name(self._kernel)
        assert of == known, f"{name} was compiled for\n{known}\nand is launched for\n{of}"
        if tensors is not None:
            want = tuple(map(_flat, kwargs))
            assert tuple(map(_flat, args)) == want, f"{name}: other addresses than its tensors'"
        else:
            assert _flat(Arguments(*args).addresses) == _flat(args)
        return launch(self, grid, args, tensors, shared)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(module.driver, "_active", driver, create=True),
        mock.patch.object(module.triton, "__version__", "3.6.0"),
        mock.patch.object(Launcher, "launch", checked),
    ):
        yield launches
