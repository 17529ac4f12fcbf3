"""Forms of a tensor with the same numbers: moved, with other strides, or both."""

import torch


def shifted(x, elements=1):
    """Return a copy that begins so many elements behind an aligned address."""
    flat = torch.zeros(x.numel() + elements, dtype=x.dtype)
    return flat[elements:].view(x.shape).copy_(x)


def spread(x, times=3):
    """Return a copy whose heads, or columns, lie in the rows of a wider tensor."""
    wide = torch.zeros(x.shape[0], x.shape[1] * times, *x.shape[2:], dtype=x.dtype)
    return wide[:, x.shape[1] : 2 * x.shape[1]].copy_(x)


def apart(x):
    """Return a copy whose tokens lie an odd number of elements apart."""
    wide = torch.zeros(x.shape[0], x[0].numel() + 1, dtype=x.dtype)
    return wide[:, :-1].unflatten(1, x.shape[1:]).copy_(x)


FORMS = (shifted, spread, apart, lambda x: spread(shifted(x)))
