"""Launching again: with the arguments, the stream and the hooks that Triton's own launch has."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from attn_core.ops.triton import launcher as module
from attn_core.ops.triton.launcher import (
    Arguments,
    Launcher,
    MapOf,
)
from triton.compiler import CompiledKernel


class Compiled(CompiledKernel):
    """A compiled kernel whose launcher notes what it is called with."""

    function, packed_metadata = 17, "packed"

    def __init__(self):
        self.calls = []
        self._run = lambda *args: self.calls.append(args)

    def launch_metadata(self, grid, stream, *args):
        return ("metadata", grid, stream, args)


class Kernel:
    """A Triton function that is compiled at its first launch."""

    def __init__(self, result):
        self.result, self.launches = result, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append((grid, args, options))
            return self.result

        return launch


class Driver:
    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        return 1000 + device


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(module.driver, "_active", Driver(), raising=False)


def test_the_second_launch_has_the_new_arguments_and_the_constants():
    compiled = Compiled()
    kernel = Kernel(compiled)
    launcher = Launcher(kernel, "C", 64, num_warps=4)
    launcher.launch((2, 1, 1), ("a",))
    assert kernel.launches == [((2, 1, 1), ("a", "C", 64), {"num_warps": 4})]
    launcher.launch((5, 6, 7), ("b",))
    launcher.launch((1, 1, 1), ("c",))
    assert len(kernel.launches) == 1, "it is compiled once"
    first, second = compiled.calls
    assert first == (5, 6, 7, 1003, 17, "packed", None, None, None, "b", "C", 64)
    assert second[:3] == (1, 1, 1)
    assert second[9:] == ("c", "C", 64)


def test_what_was_not_compiled_is_launched_as_before():
    """The interpreter returns nothing."""
    kernel = Kernel(None)
    launcher = Launcher(kernel, 8)
    for x in "ab":
        launcher.launch((1, 1, 1), (x,))
    assert [args for _, args, _ in kernel.launches] == [("a", 8), ("b", 8)]


def test_hooks_of_a_profiler_are_called(monkeypatch):
    compiled = Compiled()
    launcher = Launcher(Kernel(compiled))
    launcher.launch((1, 1, 1), ("a",))
    before, after = (lambda *_: None), (lambda *_: None)
    monkeypatch.setattr(module.knobs.runtime, "launch_enter_hook", before)
    monkeypatch.setattr(module.knobs.runtime, "launch_exit_hook", after)
    launcher.launch((4, 1, 1), ("b",))
    metadata = ("metadata", (4, 1, 1), 1003, ("b",))
    assert compiled.calls == [(4, 1, 1, 1003, 17, "packed", metadata, before, after, "b")]


class Descriptor:
    def __init__(self, base):
        self.base = base


class Pair(NamedTuple):
    ptr: torch.Tensor
    stride: int


def c_launcher(descriptors):
    """Return a launcher as Triton 3.6 makes it, and what its C function was called with.

    descriptors: the positions of arguments that are some.
    """
    calls = []

    def launcher(*args):
        calls.append(args)

    tensordesc_indices = set(descriptors)
    tensordesc_meta = [f"form {i}" for i in sorted(descriptors)]

    def inner(*args):
        raise AssertionError(launcher, tensordesc_indices, tensordesc_meta)

    class Cuda:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = staticmethod(inner if descriptors else launcher)

        def __init__(self):
            self.public = []

        def __call__(self, *args):
            self.public.append(args)

    return Cuda(), calls


@pytest.fixture
def maps(monkeypatch):
    """Collect the tensor maps that are encoded, on a Triton 3.6."""
    encoded = []

    def make(descriptor, metadata):
        encoded.append((descriptor, metadata))
        return [f"map {len(encoded)}", 1, 2]

    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", make, raising=False)
    monkeypatch.setattr(module.triton, "__version__", "3.6.0")
    return encoded


HEAD = (2, 1, 1, 1003, 17, False, True, None, None, "packed", None, None, None)
GRID = (2, 1, 1)


def launched_once(*last, first, tensors=None, descriptors=()):
    """Return a launcher after its first launch, its kernel, and the calls of its C function."""
    compiled = Compiled()
    compiled._run, calls = c_launcher(descriptors)
    launcher = Launcher(Kernel(compiled), *last)
    launcher.launch(GRID, first, tensors)
    assert calls == []
    return launcher, compiled, calls


def test_later_launches_are_given_addresses(maps):
    q, k, out, table = (torch.zeros(8) for _ in range(4))
    shared = Arguments((table, table), 5)

    def tensors():
        return Pair(q, 2), out, *shared.values

    where = [x.data_ptr() for x in (q, out, table, k)]
    first = ((where[0], 2), where[1], *shared.addresses)
    launcher, _, calls = launched_once(Pair(k, 16), k, 0.5, "C", first=first, tensors=tensors)
    assert launcher._kernel.launches == [
        (GRID, (Pair(q, 2), out, (table, table), 5, Pair(k, 16), k, 0.5, "C"), {})
    ], "the first one is given tensors, in the tuples that the kernel names"
    launcher.launch(GRID, first, tensors)
    pairs = (where[0], 2), where[1], (where[2], where[2]), 5, (where[3], 16), where[3]
    assert calls == [(*HEAD, *pairs, 0.5, "C")]
    launcher.launch(GRID, ((1600, 3), 3200, *shared.addresses), tensors)
    assert calls[1][len(HEAD) :][:2] == ((1600, 3), 3200)


def test_plain_arguments_stay_tensors(maps):
    """Triton's C function asks them for their addresses, and refuses those of the host."""
    q, k = torch.zeros(8), torch.zeros(8)
    launcher, _, calls = launched_once(k, first=(q, 3))
    launcher.launch(GRID, (q, 4))
    assert calls[0][len(HEAD)] is q
    assert calls[0][len(HEAD) + 1 :] == (4, k.data_ptr())


def test_a_tensor_map_is_encoded_once_where_its_descriptor_stays(maps):
    k, v = Descriptor(torch.zeros(8)), Descriptor(torch.zeros(8))
    rows = MapOf(1600, (4, 2), (2, 1))
    launcher, _, calls = launched_once("C", k, v, first=(rows, "out"), descriptors=(0, 3, 4))
    assert {form: x for x, form in maps} == {"form 3": k, "form 4": v}
    bound = [f"map {1 + [form for _, form in maps].index(f'form {i}')}" for i in (3, 4)]
    last = ("C", bound[0], 1, 2, bound[1], 1, 2)
    elsewhere, longer = rows._replace(address=3200), rows._replace(shape=(6, 2))
    for given in (rows, elsewhere, longer, rows, elsewhere, longer):
        launcher.launch(GRID, (given, "out"))
    assert calls == [(*HEAD, f"map {n}", 1, 2, "out", *last) for n in (3, 4, 5, 3, 4, 5)]
    encoded = [(x.base.data_ptr(), x.shape, x.strides, form) for x, form in maps[2:]]
    assert encoded == [(*given, "form 0") for given in (rows, elsewhere, longer)]


def test_hooks_are_given_tensors(maps, monkeypatch):
    q, k = torch.zeros(8), torch.zeros(8)
    arguments = ((q.data_ptr(), 7), lambda: (q, 7))
    launcher, compiled, calls = launched_once(k, first=arguments[0], tensors=arguments[1])
    chain = type("HookChain", (), {"calls": []})()
    monkeypatch.setattr(module.knobs.runtime, "launch_enter_hook", chain)
    monkeypatch.setattr(module.knobs.runtime, "launch_exit_hook", None)
    launcher.launch(GRID, *arguments)
    assert len(calls) == 1, "nobody is in the chain"
    chain.calls.append(print)
    launcher.launch(GRID, *arguments)
    assert len(calls) == 1
    [given] = compiled._run.public
    assert given[6:9] == (("metadata", GRID, 1003, (q, 7, k)), chain, None)
    assert given[9] is q
    assert given[11] is k
    chain.calls.clear()
    launcher.launch(GRID, *arguments)
    assert calls[1] == calls[0]


def test_arguments_hold_their_tensors(maps):
    """The addresses that a launch is given are of tensors that are still there."""
    k, table = torch.zeros(8), torch.zeros(8)
    gone = [weakref.ref(x) for x in (k, table)]
    shared = Arguments((table,), 3)
    launcher, _, _ = launched_once((k, 1), first=("q", *shared.addresses))
    del k, table
    gc.collect()
    assert [x() is None for x in gone] == [False, False]
    del launcher, shared
    gc.collect()
    assert [x() is None for x in gone] == [True, True]


def test_the_device_and_the_stream_are_those_of_each_launch(maps, monkeypatch):
    current, asked = [0], []
    cuda = type("Cuda", (), {})()
    cuda.get_current_device = torch.cuda.current_device
    cuda.get_current_stream = lambda device: asked.append(device) or 1000 + device
    monkeypatch.setattr(module.driver, "_active", cuda, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    launcher, _, calls = launched_once(first=("q",))
    for current[0] in (0, 3):
        launcher.launch(GRID, ("q",))
    assert [args[3] for args in calls] == [1000, 1003]
    assert asked == [0, 3]


def test_scratch_and_other_tritons_take_the_public_way(maps, monkeypatch):
    compiled = Compiled()
    compiled._run, _ = c_launcher(())
    assert module._direct(compiled, 0, ()) is not None
    compiled._run.global_scratch_size = 128
    assert module._direct(compiled, 0, ()) is None
    compiled._run.global_scratch_size = 0
    monkeypatch.setattr(module.triton, "__version__", "3.7.1")
    assert module._direct(compiled, 0, ()) is None
    launcher, compiled, calls = launched_once("C", first=(1600, 7), tensors=lambda: ("q", 7))
    launcher.launch(GRID, (3200, 8), lambda: ("r", 8))
    assert [args[9:] for args in compiled._run.public] == [("r", 8, "C")]
    assert calls == []
