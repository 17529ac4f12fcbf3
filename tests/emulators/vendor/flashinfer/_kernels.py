"""What flashinfer 0.6.14 compiles: plans that live in a workspace, and runs by them, in float32."""

import math
from dataclasses import dataclass

import attn_reference
import torch

PROCESSORS = 132
EMPTY = -5e4  # flashinfer::math::inf: what a row without keys has for its LSE
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KV_TILE = 128  # keys that a block of fa3 holds
NON_CAUSAL, CAUSAL, CUSTOM = 0, 1, 2  # MaskMode


class EmulationError(AssertionError):
    """A call that the real kernel would take, and give garbage for."""


def require(ok, message):
    """Raise EmulationError unless `ok`."""
    if not ok:
        raise EmulationError(message)


@dataclass(frozen=True)
class Schedule:
    """What a plan writes into the int workspace."""

    queries: list
    keys: list  # pages, or tokens where there are none; of fa3 what lies between two beginnings
    lengths: list
    window_left: int
    first: tuple = ()  # where the pages or tokens of each request begin, for fa3


def _ceil(a, b):
    return -(-a // b)


def _tile(rows, head_dim):
    """FA2DetermineCtaTileQ."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def _fits(buffer, nbytes, what):
    if buffer.numel() * buffer.element_size() < nbytes:
        raise RuntimeError(
            f"Buffer overflow when allocating memory for {what} with size {nbytes}, but only "
            f"{buffer.numel()} bytes available"
        )


def _check_host(*tensors):
    for t in tensors:
        require(t.device.type == "cpu" and t.dtype == torch.int32, "plan wants int32 on the host")
        require(t.is_contiguous(), "plan reads addresses: it wants contiguous tensors")


class Prefill:
    """The module that get_batch_prefill_module builds for one backend, dtypes and dims."""

    def __init__(self, backend, q, kv, o, index, d_qk, d_vo, window, soft_cap):
        equal = ((64, 64), (128, 128), (256, 256), (192, 128))
        dims = (*equal, (512, 512)) if backend == "fa2" else equal
        if (d_qk, d_vo) not in dims or index != torch.int32:
            raise RuntimeError(f"Ninja build failed: head dims {d_qk}, {d_vo} on {backend}")
        if q not in (torch.float16, torch.bfloat16) or o != q:
            raise RuntimeError(f"Ninja build failed: {q} queries, {o} output on {backend}")
        if kv != q and (backend == "fa3" or kv not in FP8):
            raise RuntimeError(f"Ninja build failed: {kv} keys for {q} queries on {backend}")
        self.backend, self.d_vo = backend, d_vo
        self.window, self.soft_cap = window, soft_cap

    def plan(
        self, float_workspace, int_workspace, page_locked, qo_indptr, kv_indptr, kv_lens,
        total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size, graph,
        head_dim_qk, head_dim_vo, causal, window_left, *fa2,
    ):  # fmt: skip
        require(len(fa2) == (3 if self.backend == "fa2" else 0), "wrong number of plan arguments")
        _check_host(qo_indptr, kv_indptr, kv_lens)
        require(page_locked.shape == int_workspace.shape, "two int workspaces of one size")
        require((window_left >= 0) == self.window, "a window that the module was not built for")
        if num_qo_heads % num_kv_heads:
            raise RuntimeError(f"num_qo_heads {num_qo_heads} should be divisible by {num_kv_heads}")
        queries, keys = (x.diff().tolist() for x in (qo_indptr, kv_indptr))
        if min(queries) < 0 or min(keys) < 0:
            raise RuntimeError("indptr should be non-negative")
        shape = (total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size, graph)
        parts = self._fa2 if fa2 else self._fa3
        info, nbytes, partial = parts(queries, keys, window_left, *shape, *fa2)
        _fits(int_workspace, nbytes, "batch_prefill_request_indices")
        _fits(float_workspace, partial, "batch_prefill_tmp_v")
        first = tuple(kv_indptr.tolist())
        int_workspace.schedule = Schedule(queries, keys, kv_lens.tolist(), window_left, first)
        return [self.backend == "fa2", *info]

    def _fa2(
        self, queries, keys, window_left, rows, batch, hq, hkv, page, graph, fixed, no_split, _
    ):  # fmt: skip
        """PrefillSplitQOKVIndptr: how many blocks, and the memory of their partial results."""
        require(fixed == -1 or fixed > 0, "a split size of no pages")
        group, most = hq // hkv, 2 * PROCESSORS // hkv
        packed = [n * group for n in queries]
        if graph:
            tile = _tile((rows - batch + 1) * group, self.d_vo)
            tiles = _ceil(rows * group, tile) + batch - 1
        else:
            tile = _tile(sum(packed) // batch, self.d_vo)
            tiles = 0
        seen = keys
        if window_left >= 0:
            seen = [min(n, _ceil(window_left + tile, page)) for n in keys]
        seen = [max(n, 1) for n in seen]

        def blocks(chunk):
            return sum(_ceil(p, tile) * _ceil(n, chunk) for p, n in zip(packed, seen, strict=True))

        longest = max(seen)
        chunk, split = longest, False
        if fixed > 0 and not no_split:
            chunk, split = fixed, longest > fixed
        elif not no_split:
            sizes = range(max(128 // page, 1), longest)
            chunk = next((c for c in sizes if blocks(c) <= most), longest)
            split = graph or chunk < longest
        new = blocks(chunk)
        padded = max(most, tiles) if graph else new
        if new > padded:
            raise RuntimeError("new batch size should not exceed padded batch size")
        nbytes = 4 * (3 * padded + batch + 2) + 20 * 16
        nbytes += (4 * (rows + 1) + padded) * split
        partial = hq * padded * tile * (self.d_vo + 1) * 4 + 32
        return (padded, rows, tile, graph, split), nbytes, partial * split

    def _fa3(self, queries, keys, window_left, rows, batch, hq, hkv, page, graph):
        """PrefillSM90Plan: one tile of queries of one head each."""
        tile = 192 if self.d_vo == 64 else 128
        most = _ceil(rows, tile) + batch - 1
        works = most if graph else sum(_ceil(n, tile) for n in queries)
        works *= 1 if most > 4096 else hq
        return (works if graph else 0, graph), 4 * (7 * works + PROCESSORS + 1) + 8 * 16, 0

    def paged_run(self, wrapper, q, k, v, out, lse, mask_mode, sm_scale, soft_cap):
        for i, (a, b) in enumerate(zip(k.stride(), v.stride(), strict=True)):
            if a != b:
                raise RuntimeError(f"k/v strides differs at {i}")
        schedule = self._scheduled(wrapper, q, k, v, out, lse, soft_cap)
        indices = wrapper._paged_kv_indices_buf
        if self.backend == "fa3":  # all is in the plan
            if mask_mode == CUSTOM:
                raise RuntimeError("BatchPrefillWithPagedKVCacheSM90Run failed: not supported")
            lengths, first = schedule.lengths, schedule.first
        else:
            indptr, last = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf
            lengths = kv_lengths(schedule, indptr, last, k.shape[1])
            first = indptr.tolist()
        pages = table(first, indices, lengths, k.shape[1])
        keys, values = (attn_reference.gather(x, pages, lengths) for x in (k, v))
        self._attend(
            wrapper, schedule, q, keys, values, out, lse, mask_mode, sm_scale, soft_cap
        )  # fmt: skip
        if self.backend == "fa3" and schedule.window_left >= 0:
            # the first tile of V comes from the start of the request (sparse_mainloop.cuh)
            out.fill_(torch.nan)

    def ragged_run(self, wrapper, q, k, v, out, lse, mask_mode, sm_scale, soft_cap):
        schedule = self._scheduled(wrapper, q, k, v, out, lse, soft_cap)
        indptr = wrapper._kv_indptr_buf
        require(indptr.diff().tolist() == schedule.keys, "kv_indptr is not the planned one")
        keys = attn_reference.split(k, indptr)
        # fa3 loads V by TMA over all requests (hopper/mainloop.cuh); fa2 clears what is past a
        # request's end (SharedMemFillMode::kFillZero in prefill.cuh)
        values = attn_reference.split(v, indptr, tile=KV_TILE if self.backend == "fa3" else 1)
        self._attend(
            wrapper, schedule, q, keys, values, out, lse, mask_mode, sm_scale, soft_cap
        )  # fmt: skip

    def _scheduled(self, wrapper, q, k, v, out, lse, soft_cap):
        """Check what kernels take by address, and return the plan that lies in the workspace."""
        schedule = wrapper._int_workspace_buffer.schedule
        queries = wrapper._qo_indptr_buf.diff().tolist()
        require(queries == schedule.queries, "qo_indptr is not the planned one")
        require(wrapper._window_left == schedule.window_left, "not the planned window")
        require((soft_cap > 0) == self.soft_cap, "a soft cap the module was not built for")
        for x in (q, k, v, out):
            aligned = all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
            require(x.stride(-1) == 1 and aligned, "rows of 16 bytes, the last dim contiguous")
            require(x.data_ptr() % 16 == 0, "addresses of 16 bytes")
        require(out.is_contiguous() or self.backend == "fa3", "fa2 writes a contiguous out")
        require(lse is None or lse.is_contiguous(), "the LSE is written contiguously")
        return schedule

    def _attend(
        self, wrapper, schedule, q, keys, values, out, lse, mask_mode, sm_scale, soft_cap
    ):  # fmt: skip
        masks = None
        if mask_mode == CUSTOM:
            masks = unpacked(wrapper, schedule.queries, [x.shape[0] for x in keys])
        attend(
            q, keys, values, schedule.queries, out, lse, sm_scale, soft_cap, schedule.window_left,
            causal=mask_mode == CAUSAL, masks=masks,
        )  # fmt: skip


class Decode:
    """The module that get_batch_decode_module builds: CUDA cores, one query per request."""

    def __init__(self, q, kv, o, index, d_qk, d_vo, window, soft_cap):
        if d_qk != d_vo or d_qk not in (64, 128, 256, 512) or index != torch.int32:
            raise RuntimeError(f"Ninja build failed: head dims {d_qk}, {d_vo}")
        if o != q or (kv != q and kv not in FP8):
            raise RuntimeError(f"Ninja build failed: {q} queries, {kv} keys, {o} output")
        self.window, self.soft_cap = window, soft_cap

    def plan(
        self, float_workspace, int_workspace, page_locked, indptr, batch_size, num_qo_heads,
        num_kv_heads, page_size, graph, window_left, soft_cap, head_dim_qk, head_dim_vo,
        empty_q, empty_kv,
    ):  # fmt: skip
        _check_host(indptr)
        if num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        require((window_left >= 0) == self.window, "a window that the module was not built for")
        most = 16 * PROCESSORS // num_kv_heads
        padded = max(most, batch_size) if graph else batch_size + most
        _fits(int_workspace, 13 * padded + 128, "batch_decode_request_indices")
        _fits(float_workspace, num_qo_heads * padded * (head_dim_vo + 1) * 4, "batch_decode_tmp_v")
        pages = indptr.diff().tolist()
        int_workspace.schedule = Schedule([1] * batch_size, pages, [], window_left)
        return [padded if graph else 0, graph]

    def run(self, wrapper, q, k, v, out, lse, sm_scale, soft_cap):
        if k.stride() != v.stride():
            raise RuntimeError("k/v strides differ")
        schedule = wrapper._int_workspace_buffer.schedule
        require(len(schedule.queries) == q.shape[0], "decode takes one query per request")
        require(wrapper._window_left == schedule.window_left, "not the planned window")
        require(out.is_contiguous() and q.stride(-1) == 1, "contiguous rows")
        indptr, last = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf
        lengths = kv_lengths(schedule, indptr, last, k.shape[1])
        indices = wrapper._paged_kv_indices_buf
        pages = table(indptr.tolist(), indices, lengths, k.shape[1])
        keys, values = (attn_reference.gather(x, pages, lengths) for x in (k, v))
        attend(
            q, keys, values, schedule.queries, out, lse, sm_scale, soft_cap, schedule.window_left,
            causal=False, masks=None,
        )  # fmt: skip


def kv_lengths(schedule, indptr, last_page_len, page_size):
    """Return the lengths that a CSR on the device says, which must be those of the plan."""
    pages, last = indptr.diff().tolist(), last_page_len.tolist()
    lengths = [(n - 1) * page_size + x if n else 0 for n, x in zip(pages, last, strict=True)]
    require(min(lengths) >= 0, "unsigned lengths")
    require([_ceil(n, page_size) for n in lengths] == schedule.keys, "not the planned lengths")
    return lengths


def table(first, indices, lengths, page_size):
    """Return the pages of each request, int32 [n] each."""
    require(indices.dtype == torch.int32 and indices.is_contiguous(), "a list of int32")
    found = [indices[a : a + _ceil(n, page_size)] for a, n in zip(first, lengths, strict=False)]
    whole = all(len(x) == _ceil(n, page_size) for x, n in zip(found, lengths, strict=True))
    require(whole, "indices end before the last request's pages")
    return found


def unpacked(wrapper, queries, lengths):
    """Read each request's bits, little endian, from the byte that mask_indptr names."""
    starts, packed = wrapper._mask_indptr_buf.tolist(), wrapper._custom_mask_buf
    masks = []
    for n, keys, first in zip(queries, lengths, starts, strict=False):
        data = packed[first : first + _ceil(n * keys, 8)]
        bits = (data[:, None] >> torch.arange(8)) & 1
        require(bits.numel() >= n * keys, "a mask that ends before its request")
        masks.append(bits.flatten()[: n * keys].view(n, keys).bool())
    return masks


def attend(
    q, keys, values, queries, out, lse, sm_scale, soft_cap, window_left, *, causal, masks
):  # fmt: skip
    """Write the attention into `out`, and its log-sum-exp in base 2 into `lse`."""
    got, total = attn_reference.attend(
        q,
        keys,
        values,
        query_lens=queries,
        scale=sm_scale,
        causal=causal,
        left=None if window_left < 0 else window_left,
        softcap=soft_cap,
        masks=masks,
    )
    out.copy_(got.to(out.dtype))
    if lse is not None:
        lse.copy_((total * math.log2(math.e)).masked_fill(total == -torch.inf, EMPTY))
