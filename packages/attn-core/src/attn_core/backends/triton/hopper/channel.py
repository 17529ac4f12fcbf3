"""Tiles in shared memory that some warps fill and others read, stage by stage."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.
# No `from __future__ import annotations`: an aggregate checks its fields by these annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import core

# _aggregate is its name in Triton 3.6 and 3.7
aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate


@aggregate
class Channel:
    """A ring of STAGES tiles, each with a barrier that says full and one that says free.

    Producer and consumers count their steps alike: step i is in stage i % STAGES.
    """

    tile: core.base_value
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tile, full, free, STAGES):
        self.tile = tile
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def stage(self, step):
        """Return the stage of a step."""
        return step % self.STAGES

    @gluon.jit
    def wait_full(self, step):
        """Wait until the tile of a step has been filled."""
        stage = step % self.STAGES
        phase = (step // self.STAGES) & 1
        mbarrier.wait(self.full.index(stage), phase)

    @gluon.jit
    def wait_free(self, step):
        """Wait until all consumers have released the tile that the one of this step replaces."""
        stage = step % self.STAGES
        phase = ((step // self.STAGES) & 1) ^ 1
        mbarrier.wait(self.free.index(stage), phase)

    @gluon.jit
    def fill(self, step):
        """Say that a group of warps has filled the tile of a step; TMA says so itself."""
        mbarrier.arrive(self.full.index(step % self.STAGES), count=1)

    @gluon.jit
    def release(self, step):
        """Say that a consumer has read the tile of a step."""
        mbarrier.arrive(self.free.index(step % self.STAGES), count=1)


@gluon.jit
def new_channel(tile, STAGES: gl.constexpr):
    """Return a channel of STAGES tiles; init_barriers comes next."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Channel(tile, full, free, STAGES)


@gluon.jit
def new_kv_channels(dtype: gl.constexpr, CONFIG: gl.constexpr):
    """Return a channel of keys and one of values, BN by D; init_barriers comes next."""
    BN: gl.constexpr = CONFIG.BN
    D: gl.constexpr = CONFIG.D
    STAGES: gl.constexpr = CONFIG.STAGES
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    k_tile = gl.allocate_shared_memory(dtype, [STAGES, BN, D], L)
    v_tile = gl.allocate_shared_memory(dtype, [STAGES, BN, D], L)
    return new_channel(k_tile, STAGES), new_channel(v_tile, STAGES)


@gluon.jit
def init_barriers(channels, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Initialise the barriers of a tuple of channels with as many stages.

    PRODUCERS: threads that fill a tile, 1 where TMA does. CONSUMERS: groups of warps that read it.
    """
    for stage in gl.static_range(channels[0].STAGES):
        for i in gl.static_range(len(channels)):
            mbarrier.init(channels[i].full.index(stage), count=PRODUCERS)
        for i in gl.static_range(len(channels)):
            mbarrier.init(channels[i].free.index(stage), count=CONSUMERS)
