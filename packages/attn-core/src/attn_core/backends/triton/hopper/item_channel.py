"""How the warp that loads tells those that multiply which items a program has."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.hopper.channel import new_channel
from attn_core.backends.triton.hopper.split_kv import SplitItem

_FIELDS = gl.constexpr(32)  # a power of two, more than the fields of a SplitItem
_STAGES = gl.constexpr(4)  # the loads may be two items ahead where these are short


@gluon.jit
def new_items():
    """Return a channel of items; init_barriers comes next. Consumers release an item at its end."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return new_channel(gl.allocate_shared_memory(gl.int32, [_STAGES, _FIELDS], LAYOUT), _STAGES)


@gluon.jit
def push_item(items, iteration, item, place):
    """Wait until the channel has room, then hand on an item and the place of its state.

    One warp calls it.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, _FIELDS, L)
    packed = gl.full([_FIELDS], 0, gl.int32, L)
    for i in gl.static_range(len(item)):
        packed = gl.where(field == i, item[i], packed)
    packed = gl.where(field == len(item), place, packed)
    items.wait_free(iteration)
    items.tile.index(items.stage(iteration)).store(packed)
    items.fill(iteration)


@gluon.jit
def read_item(items, iteration, WARPS: gl.constexpr):
    """Return an item that is there, see wait_full, and the place of its state.

    Each thread reads all fields.
    """
    L: gl.constexpr = gl.BlockedLayout([_FIELDS], [32], [WARPS], [0])
    packed = items.tile.index(items.stage(iteration)).load(L)
    item = SplitItem(
        _field(packed, 0), _field(packed, 1), _field(packed, 2), _field(packed, 3),
        _field(packed, 4), _field(packed, 5), _field(packed, 6), _field(packed, 7),
        _field(packed, 8), _field(packed, 9), _field(packed, 10), _field(packed, 11),
        _field(packed, 12), _field(packed, 13), _field(packed, 14), _field(packed, 15),
        _field(packed, 16),
    )  # fmt: skip
    return item, _field(packed, 17)


@gluon.jit
def _field(packed, i: gl.constexpr):
    field = gl.arange(0, packed.shape[0], packed.type.layout)
    return gl.sum(gl.where(field == i, packed, 0), 0)
