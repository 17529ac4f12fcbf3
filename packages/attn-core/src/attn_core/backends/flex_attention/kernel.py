"""torch's flex_attention, compiled once per shape of layer, with every size of a batch dynamic."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attn_core.backends.flex_attention.plan import Tiles
from attn_core.errors import UnsupportedError

# Which sizes of a compiled function's parameters change from pass to pass, or with the pool.
_POOL, _LIST = (0, 1), (0, 3)
_DYNAMIC = ((0, 2), _POOL, _POOL, (0,), (0,), _LIST, _LIST, (0,), (0,), (0,), (0,), (0,))


class KernelShape(NamedTuple):
    """What is fixed in a compiled kernel; number of tiles, rows, pages and lengths are not.

    block: keys that are attended or skipped together, a page or an even part of it; max_rows: most
    query rows of a tile.
    """

    device: str
    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    logit_cap: float | None
    block: int
    max_rows: int


class Kernel:
    """One compiled flex_attention; `compiled` lists the sizes of each compilation, in order.

    Compiles when it is made, so that a machine that cannot raises UnsupportedError then.
    """

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        self.compiled: list[str] = []
        self._run = torch.compile(
            _attend(shape),
            backend=self._compile,
            fullgraph=True,
            options={"guard_filter_fn": _guarded},
        )
        self._probe()

    def _compile(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        sizes = [str(list(x.shape)) for x in inputs if isinstance(x, Tensor)]
        self.compiled.append(" ".join(sizes))
        built: Callable[..., object] = lookup_backend("inductor")(graph, inputs)
        return built

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
        """Attend q [tiles, Hkv, rows, D] to k [pages, page_size, Hkv, D] and v, alike with Dv.

        Returns [tiles, Hkv, rows, Dv]. Gradients and inference mode are off in the caller.
        """
        out: Tensor = self._run(*self._inputs(q, k, v, tiles))
        return out

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, ...]:
        """In the order of the compiled function's parameters and of _DYNAMIC."""
        lists = tiles.lists(k.shape[0] * k.shape[1] // self.shape.block)
        counts = (tiles.partial_count, tiles.full_count)
        rows = (tiles.low, tiles.high, tiles.first_row)
        return (q, k, v, *counts, lists.partial, lists.full, *rows, lists.places, lists.starts)

    def _probe(self) -> None:
        """Compile with every size of a batch and of a pool marked as dynamic."""
        s, count, rows = self.shape, 3, 4

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=s.device)

        try:
            with torch.inference_mode(False), torch.no_grad():
                index, empty = zeros(count, dtype=torch.int64), zeros(0, dtype=torch.int64)
                tiles = Tiles(
                    requests=2,
                    tokens=empty,
                    picks=empty,
                    partial_count=zeros(count, 1, 1),
                    partial=zeros(count, 1),
                    full_count=zeros(count, 1, 1),
                    full=zeros(count, 1),
                    low=zeros(count * rows),
                    high=zeros(count * rows),
                    first_row=index,
                    request=index,
                    real=empty,
                    logical=empty,
                )
                inputs = self._inputs(
                    zeros(count, s.num_kv_heads, rows, s.head_dim, dtype=s.dtype),
                    zeros(5, 2 * s.block, s.num_kv_heads, s.head_dim, dtype=s.dtype),
                    zeros(5, 2 * s.block, s.num_kv_heads, s.v_head_dim, dtype=s.dtype),
                    tiles,
                )
                for x, dims in zip(inputs, _DYNAMIC, strict=True):
                    torch._dynamo.mark_dynamic(x, dims)
                self._run(*inputs)
        except Exception as error:  # whatever the compiler says: keep it, say what to do
            message = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
            raise UnsupportedError(
                f"flex_attention cannot be compiled here for {s}: {type(error).__name__}: "
                f"{' '.join(message[:3])}; on a CPU it needs AVX2 and a C++ compiler (g++), "
                "elsewhere Triton; or take another backend, torch_native runs anywhere"
            ) from error
        if not self.compiled:
            raise UnsupportedError(
                "torch.compile is off in this process (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE "
                "or torch._dynamo.config), and flex_attention without it reads the whole pool; "
                "switch it on or take another backend, such as torch_native"
            )


def _guarded(guards: Sequence[Any]) -> list[bool]:
    """Leave out the registry of pytrees: a model that registers its own changes nothing here.

    Guarded, every such class (transformers has one per kind of output) would compile anew.
    """
    return ["SUPPORTED_NODES" not in guard.name for guard in guards]


@cache
def compiled_kernel(shape: KernelShape) -> Kernel:
    """Return the kernel of a shape; backends of one process share it, as they share compilers."""
    return Kernel(shape)


def _at(table: Tensor, index: Tensor) -> Tensor:
    """Look up a table whose index is in range.

    On a CPU without a check and without a size in the compiled code: inductor's template there may
    take the name of a size for its own. Its templates in Triton take no masked load in a mask.
    """
    if table.device.type != "cpu":
        return table[index]
    picked: Tensor = torch.ops.aten._unsafe_masked_index(table, index == index, [index], 0)
    return picked


def _options(shape: KernelShape) -> Any:
    """Return the keys of a tile in Triton: inductor's own number need not divide a block of keys.

    Halved for wide heads and for float32, so that two tensors of tiles fit the shared memory.
    """
    if shape.device.startswith("cpu"):
        return None
    large_head = max(shape.head_dim, shape.v_head_dim) > 128
    keys = 64 >> (large_head + (shape.dtype == torch.float32))
    return {"BLOCK_N": min(shape.block, keys)}


def _attend(shape: KernelShape) -> Callable[..., Tensor]:
    block, scale, options = shape.block, shape.scale, _options(shape)
    q_block = math.ceil(shape.max_rows / 128) * 128
    cap = shape.logit_cap or 0.0

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        partial_count: Tensor,
        full_count: Tensor,
        partial: Tensor,
        full: Tensor,
        low: Tensor,
        high: Tensor,
        first_row: Tensor,
        places: Tensor,
        starts: Tensor,
    ) -> Tensor:
        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = _at(first_row, b) + i
            position = _at(places, _at(starts, b) + j // block) * block + j % block
            return (position >= _at(low, row)) & (position <= _at(high, row))

        keys, values = (x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (k, v))
        mask = BlockMask(
            (q.shape[2], keys.shape[2]),
            kv_num_blocks=partial_count,
            kv_indices=partial,
            full_kv_num_blocks=full_count,
            full_kv_indices=full,
            q_num_blocks=partial_count,  # these serve the backward pass only; torch 2.8 wants some
            q_indices=partial,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(q_block, block),
            mask_mod=visible,
        )
        score_mod = capped if cap else None
        return flex_attention(
            q, keys, values, score_mod=score_mod, block_mask=mask, scale=scale,
            kernel_options=options,
        )  # fmt: skip

    # torch bounds the compilations of a code object and learns from its earlier ones which numbers
    # vary; all kernels come from this one, so each gets a copy with a name of its own
    code = attend.__code__.replace(co_name=f"attend {shape}")
    return types.FunctionType(code, globals(), closure=attend.__closure__)
