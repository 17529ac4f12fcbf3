"""What the emulated kernels of Wave check: they take addresses of dense tensors."""

import torch


class Kernel:
    """A kernel of a template: a function, and the symbols that it is compiled with."""

    def __init__(self, run, symbols, dynamic):
        self.run, self.symbols, self.dynamic = run, symbols, dynamic

    def __call__(self, *args):
        return self.run(*args)


def dense(t, dtype, shape):
    """Sizes but the first are compiled in."""
    assert t.dtype == dtype, f"compiled for {dtype}, not {t.dtype}"
    assert t.is_contiguous(), "a kernel knows no strides"
    assert tuple(t.shape[1:]) == tuple(shape), f"compiled for {shape}, not {tuple(t.shape[1:])}"
    assert t.data_ptr() % 16 == 0, "loads of 16 bytes at an odd address"


def int32(t):
    assert t.dtype == torch.int32
    assert t.is_contiguous()
