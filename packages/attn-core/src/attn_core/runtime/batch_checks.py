"""Checks of a batch's tensors, which read no value on a device.

They run in every pass, so no text is made before there is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index

import torch
from torch import Tensor

from attn_core.cache.state_pool import CHUNK_SIZE
from attn_core.errors import BatchError


def check_instance(name: str, value: object, kind: type) -> None:
    """Raise BatchError unless `value` is of a class. No value is printed: it may hold tensors."""
    if not isinstance(value, kind):
        raise BatchError(f"{name} is {type(value).__name__} (expected {kind.__name__})")


def integers(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return lengths as plain integers, which tensors and arrays do not hold. Raises BatchError."""
    try:
        return tuple(map(index, lengths))
    except TypeError:
        raise BatchError(f"{name} {lengths!r} (expected integers, one per request)") from None


def check_number(name: str, value: int) -> None:
    """Raise BatchError unless `value` is an integer of 0 or more, on the host."""
    [number] = integers(name, [value])
    if number < 0:
        raise BatchError(f"{name} {value} (expected 0 or more)")


def check_tensor(
    name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], *, rows: bool = False
) -> None:
    """Raise BatchError for another dtype or shape, None being any, or for strided columns.

    rows: the rows may lie apart.
    """
    if not isinstance(t, Tensor):
        raise BatchError(f"{name} is {type(t).__name__} (expected a tensor of {dtype})")
    if t.dtype != dtype:
        raise BatchError(f"{name} is {t.dtype} (expected {dtype})")
    if t.dim() != len(shape) or any(
        expected is not None and size != expected
        for size, expected in zip(t.shape, shape, strict=True)
    ):
        raise BatchError(f"{name} has shape {tuple(t.shape)} (expected {shape}, None = any)")
    # Refused, not copied: graphs overwrite these tensors in place.
    if not (t.stride(-1) == 1 if rows else t.is_contiguous()):
        layout = "stride(-1) 1" if rows else "contiguous"
        raise BatchError(f"{name} has strides {t.stride()} (expected {layout}); call .contiguous()")


def check_starts(
    name: str, cu_seqlens: Tensor, tokens: int, lens: Sequence[int] | None = None
) -> None:
    """Raise BatchError for starts that cut no ranges of `tokens` tokens, or others than `lens`.

    Only on a CPU, where reading them waits for nothing. Tokens behind the last range are padding.
    """
    if type(cu_seqlens) is not Tensor or not cu_seqlens.is_cpu or torch.compiler.is_compiling():
        return
    starts: list[int] = cu_seqlens.tolist()
    if starts[:1] != [0] or starts[-1] > tokens or starts != sorted(starts):
        raise BatchError(
            f"{name} {starts[:9]} (expected to rise from 0 to at most {tokens}, the tokens)"
        )
    if lens is not None and [*accumulate(lens, initial=0)] != starts:
        raise BatchError(f"{name} {starts[:9]} of other lengths than {list(lens)[:8]}, on the host")


def num_chunks(query_lens: Sequence[int]) -> int:
    """Return how many chunks of 64 tokens these requests have, each its own last, partial one."""
    return sum(-(-n // CHUNK_SIZE) for n in query_lens)


def check_states(
    b: int,
    slots: Tensor | None,
    slots_out: Tensor | None,
    fresh: Tensor | None,
    checkpoints: Tensor | None,
    query_lens: Sequence[int] | None,
) -> set[str]:
    """Check the slots of linear layers; return the devices that they are on."""
    optional = {"state_slots_out": slots_out, "state_fresh": fresh, "checkpoint_slots": checkpoints}
    present = {name: x for name, x in optional.items() if x is not None}
    if slots is None:
        if present:
            raise BatchError(f"{' and '.join(present)} without state_slots")
        return set()
    check_tensor("state_slots", slots, torch.int32, (b,))
    for name, x in present.items():
        dtype = torch.bool if name == "state_fresh" else torch.int32
        check_tensor(name, x, dtype, (None if name == "checkpoint_slots" else b,))
    if checkpoints is not None and query_lens is not None:
        chunks, count = num_chunks(query_lens), checkpoints.shape[0]
        if count != chunks:
            raise BatchError(
                f"checkpoint_slots has {count} slots for {chunks} chunks of {CHUNK_SIZE} tokens"
            )
    return {str(x.device) for x in (slots, *present.values())}
