"""What the kernels of linear attention are given: tuples of pointers and numbers, and constants.

Triton flattens a NamedTuple into one parameter per field. Strides count elements. A field is a
tensor or a number on the host, and a pointer or a scalar in a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Tokens [T, H, D], or [T, H]; the elements of a head are adjacent."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class Inputs(NamedTuple):
    """One layer's q, k [T, Hk, K], v [T, Hv, V], g [T, Hv] or [T, Hv, K], and beta [T, Hv]."""

    q: Rows
    k: Rows
    v: Rows
    g: Rows
    beta: Rows


class Weights(NamedTuple):
    """Of a gate: A_log [Hv], dt_bias [Hv] or [Hv, K]. Any pointers without a gate."""

    A_log: Any
    dt_bias: Any

    def addresses(self) -> tuple[int, int]:
        """Return where they lie."""
        return self.A_log.data_ptr(), self.dt_bias.data_ptr()


class Numbers(NamedTuple):
    """Floats: the scale of the output, the eps of the norm of q and k, and the gate's bound."""

    scale: Any
    eps: Any
    lower_bound: Any


class States(NamedTuple):
    """States [layers, slots, Hv, V, K] or one layer's; each slot is contiguous."""

    ptr: Any
    layer_stride: Any
    slot_stride: Any


class Slots(NamedTuple):
    """int32 [B]: the slots to read and to write, -1 is none. fresh: bool [B], start from zeros."""

    read: Any
    write: Any
    fresh: Any

    def addresses(self) -> tuple[int, int, int]:
        """Return where they lie."""
        return self.read.data_ptr(), self.write.data_ptr(), self.fresh.data_ptr()


class Records(NamedTuple):
    """What verify leaves of n drafts: States of u [.., n, Hv, V], k [.., n, Hk, K], g [.., n, Hv].

    u: the update of a draft. k: its normalised key. g: its log decay, [.., n, Hv, K] per channel.
    """

    u: States
    k: States
    g: States


class Chunks(NamedTuple):
    """The chunks of a pass, int32, all on the device.

    start, count [chunks]: the first token of a chunk, and how many it has. cu_seqlens [B + 1]: the
    first token of each request. first [B]: the first chunk of each. order [B]: the requests, the
    longest first, so that no long one is left at the end. turn [chunks]: the chunks, the first ones
    of all requests first.
    """

    start: Any
    count: Any
    cu_seqlens: Any
    first: Any
    order: Any
    turn: Any


class Workspace(NamedTuple):
    """What `prepare` computes of each chunk and value head, for `scan`.

    T [chunks, Hv, 2, 64, 64]: T = (I + L)^-1 diag(beta), and P = scale · q·k with decay; P · T from
    kernels that are not Gluon's, and with a decay per channel.
    factors float32 [chunks, Hv, 3, 64]: what each token's k·S, q·S and update are multiplied by.
    decay float32 [chunks, Hv] or [chunks, Hv, K]: by which the chunk multiplies the state.
    k_in, q_in, k_out [chunks, Hv, 64, K]: keys and queries with a decay per channel; these replace
    the factors.
    ready int32 [chunks, Hv, programs]: zeros, where each program of `scan` waits for a chunk.
    taken int32 [1]: zero, how many chunks and heads were taken to be prepared.
    """

    T: Any
    factors: Any
    decay: Any
    k_in: Any
    q_in: Any
    k_out: Any
    ready: Any
    taken: Any


class Constants(NamedTuple):
    """What a kernel is compiled for, of a layer.

    HV: value heads. GROUP: value heads of a key head. K, V: head dims. PER_CHANNEL: g has a decay
    for each key channel. GATE: see gates.py. NEG_EIGVAL: beta is twice a sigmoid. NORM: q and k
    are normalised here. FRESH: some requests start from zeros. TREE: drafts have a mask.
    CHECKPOINTS: states after chunks are kept. PRECISION: of products of float32.
    """

    HV: int
    GROUP: int
    K: int
    V: int
    PER_CHANNEL: bool
    GATE: int
    NEG_EIGVAL: bool
    NORM: bool
    FRESH: bool = False
    TREE: bool = False
    CHECKPOINTS: bool = False
    PRECISION: str = "ieee"
