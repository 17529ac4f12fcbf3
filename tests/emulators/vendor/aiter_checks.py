"""What the emulated functions of AITER check, as its C++ and its kernels do."""

import torch

HALF = (torch.float16, torch.bfloat16)


def check(ok, message):
    """Refuse what the library refuses."""
    if not ok:
        raise RuntimeError(message)


def int32(t, name, shape):
    """A kernel takes its address alone: int32, contiguous."""
    check(t.dtype == torch.int32, f"{name} must have dtype int32")
    check(t.is_contiguous(), f"{name} must be contiguous")
    check(tuple(t.shape) == shape, f"{name} must have shape {shape}")


def aligned(t, name):
    """16 bytes are loaded at a time; the last dimension is dense."""
    check(t.stride(-1) == 1, f"{name} must have contiguous last dimension")
    steps = [s * t.element_size() for s in t.stride()[:-1]]
    assert all(s % 16 == 0 for s in steps), f"{name}: loads of 16 bytes at strides {steps}"
    assert t.data_ptr() % 16 == 0, f"{name}: loads of 16 bytes at an odd address"


def fill(out, result):
    """Write the rows that have a request; the others stay as they are."""
    rows = ~result.isnan().all(-1).all(-1)
    out[rows] = result[rows].to(out.dtype)
