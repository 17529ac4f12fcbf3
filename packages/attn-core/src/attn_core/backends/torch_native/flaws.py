"""Keep what is not finite in a draft from the drafts that do not see it."""

from __future__ import annotations

import torch
from torch import Tensor


def find_flaws(k: Tensor, g: Tensor, beta: Tensor, v: Tensor) -> Tensor | None:
    """Return bool [B, n, Hv, V]: values of drafts with an input that is not finite; None if none.

    A mask does not keep such inputs out of a product, since 0 times NaN is NaN. The check waits for
    the device.
    """
    if all(bool(x.sum().isfinite()) for x in (k, g, beta, v)):
        return None
    of_k, of_g = ~k.isfinite().all(-1), ~g.isfinite()
    of_k = of_k.repeat_interleave(v.shape[-2] // k.shape[-2], -1)
    of_g = of_g if g.dim() == 3 else of_g.any(-1)
    return (of_k | of_g | ~beta.isfinite())[..., None] | ~v.isfinite()


def without_flaws(flawed: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of drafts with 0 in place of what is not finite."""
    return inputs if flawed is None else tuple(x.masked_fill(~x.isfinite(), 0.0) for x in inputs)


def with_flaws(flawed: Tensor | None, mask: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
    """Return results [B, n, Hv, V] with NaN for drafts that see a flaw, by their mask."""
    if flawed is None:
        return results
    seen = (mask.float() @ flawed.flatten(2).float()).view_as(flawed) > 0
    return tuple(x.masked_fill(seen, torch.nan) for x in results)
