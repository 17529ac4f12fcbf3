"""A GPU's approximate instructions, at the worst that the PTX ISA allows; float64 on a CPU."""

import math

import torch


def lg2_approx(x):
    """Return log2 of x > 0: off by 2^-22 between 1/2 and 2, elsewhere by 2^-22 of itself."""
    exact = x.double().log2()
    near = (x > 0.5) & (x < 2)
    return torch.where(near, exact + 2.0**-22, exact * (1 + 2.0**-22))


def fast_log(x):
    """Return the natural logarithm that compilers make of it (CuTe DSL: fastmath=True)."""
    return lg2_approx(x) * math.log(2)
