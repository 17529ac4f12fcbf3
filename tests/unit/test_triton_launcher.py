"""Launching again: with the arguments, the stream and the hooks that Triton's own launch has."""

import gc
import sys
import threading
import weakref

import pytest
import torch

pytest.importorskip("triton")

from attn_core.ops.triton import launcher as module
from attn_core.ops.triton.launcher import Launcher, alike, numbered
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
    launch = Launcher(kernel, "C", 64, num_warps=4)
    launch((2, 1, 1), "a")
    assert kernel.launches == [((2, 1, 1), ("a", "C", 64), {"num_warps": 4})]
    launch((5, 6, 7), "b")
    launch((1, 1, 1), "c")
    assert len(kernel.launches) == 1, "it is compiled once"
    first, second = compiled.calls
    assert first == (5, 6, 7, 1003, 17, "packed", None, None, None, "b", "C", 64)
    assert second[:3] == (1, 1, 1)
    assert second[9:] == ("c", "C", 64)


def test_what_was_not_compiled_is_launched_as_before():
    """The interpreter returns nothing."""
    kernel = Kernel(None)
    launch = Launcher(kernel, 8)
    for x in "ab":
        launch((1, 1, 1), x)
    assert [args for _, args, _ in kernel.launches] == [("a", 8), ("b", 8)]


def test_hooks_of_a_profiler_are_called(monkeypatch):
    compiled = Compiled()
    launch = Launcher(Kernel(compiled))
    launch((1, 1, 1), "a")
    before, after = (lambda *_: None), (lambda *_: None)
    monkeypatch.setattr(module.knobs.runtime, "launch_enter_hook", before)
    monkeypatch.setattr(module.knobs.runtime, "launch_exit_hook", after)
    launch((4, 1, 1), "b")
    metadata = ("metadata", (4, 1, 1), 1003, ("b",))
    assert compiled.calls == [(4, 1, 1, 1003, 17, "packed", metadata, before, after, "b")]


class Descriptor:
    def __init__(self, base):
        self.base = base


def c_launcher(with_descriptors):
    """Return a launcher as Triton 3.6 makes it, and what its C function was called with."""
    calls = []

    def launcher(*args):
        calls.append(args)

    tensordesc_indices, tensordesc_meta = {1, 2}, ["k's", "v's"]

    def inner(*args):
        raise AssertionError(launcher, tensordesc_indices, tensordesc_meta)

    class Cuda:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = staticmethod(inner if with_descriptors else launcher)

    return Cuda(), calls


@pytest.fixture
def maps(monkeypatch):
    """Collect the tensor maps that are encoded, on a Triton 3.6."""
    encoded = []

    def make(descriptor, form):
        encoded.append((descriptor, form))
        return [f"map {len(encoded)}", 1, 2]

    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", make, raising=False)
    monkeypatch.setattr(module.triton, "__version__", "3.6.0")
    return encoded


def direct(run, *args):
    run((2, 1, 1), 1003, None, None, None, args)


HEAD = (2, 1, 1, 1003, 17, False, True, None, None, "packed", None, None, None)


def test_a_tensor_map_is_kept_while_its_descriptor_and_address_stay(maps):
    compiled = Compiled()
    compiled._run, calls = c_launcher(with_descriptors=True)
    run = module._direct(compiled)
    k, v = Descriptor(torch.zeros(8)), Descriptor(torch.zeros(8))
    for q in ("q1", "q2"):
        direct(run, q, k, v, "out")
    assert calls == [(*HEAD, q, "map 1", 1, 2, "map 2", 1, 2, "out") for q in ("q1", "q2")]
    assert maps == [(k, "k's"), (v, "v's")]
    other = Descriptor(torch.zeros(8))
    direct(run, "q", k, other, "out")
    assert maps[2:] == [(other, "v's")]
    old = k.base
    k.base = torch.zeros(8)  # the pool moved, and the descriptor is the same
    direct(run, "q", k, other, "out")
    assert maps[3:] == [(k, "k's")]
    assert old is not k.base


def test_a_descriptor_is_not_kept_alive(maps):
    """That of a pass's queries would keep the queries of every layer."""
    compiled = Compiled()
    compiled._run, _ = c_launcher(with_descriptors=True)
    run, k, v = module._direct(compiled), Descriptor(torch.zeros(8)), Descriptor(torch.zeros(8))
    direct(run, "q", k, v, "out")
    gone = weakref.ref(k)
    del k
    maps.clear()
    gc.collect()
    assert gone() is None
    other = Descriptor(torch.zeros(8))
    direct(run, "q", other, v, "out")
    assert maps == [(other, "k's")]


def test_without_descriptors_the_c_function_is_called_as_it_is(maps):
    compiled = Compiled()
    compiled._run, calls = c_launcher(with_descriptors=False)
    direct(module._direct(compiled), "q", "out")
    assert calls == [(*HEAD, "q", "out")]


def test_scratch_and_other_tritons_take_the_public_way(maps, monkeypatch):
    compiled = Compiled()
    compiled._run, _ = c_launcher(with_descriptors=False)
    compiled._run.global_scratch_size = 128
    assert module._direct(compiled) is None
    compiled._run.global_scratch_size = 0
    monkeypatch.setattr(module.triton, "__version__", "3.7.1")
    assert module._direct(compiled) is None


def test_keys_are_equal_where_triton_specialises_alike(monkeypatch):
    flat = torch.zeros(64, dtype=torch.bfloat16)
    assert alike(flat) == alike(flat[8:]) == alike(flat[16:])
    assert alike(flat) != alike(flat[1:])
    assert alike(flat) != alike(flat.view(torch.float16))
    # AMD's compiler takes offsets of 32 bits where a whole storage is that small
    large = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(module, "_ON_AMD", True)
    assert alike(large[:64]) != alike(torch.empty(64, dtype=torch.bfloat16, device="meta"))
    one = numbered(("test", 1))
    assert one == numbered(("test", 1)) != numbered(("test", 2))


def test_threads_draw_different_numbers(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", {})
    interval, drawn = sys.getswitchinterval(), []

    def draw(thread):
        drawn.extend(numbered((thread, i)) for i in range(20000))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({*drawn}) == 80000
