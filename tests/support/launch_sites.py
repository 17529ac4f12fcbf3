"""Where the Triton backend launches kernels: name → a call with tensors that have no memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import triton
import triton.language as tl
from attn_core.backends.triton import scheduler
from attn_core.backends.triton.scheduler import UNSPLIT_KEYS
from attn_core.backends.triton.sparse.launch import score as score_queries
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.cache.pool import KVPool
from attn_core.ops.triton.gather import gather_pages
from attn_core.ops.triton.index import write_index
from attn_core.ops.triton.kv import write_kv
from attn_core.ops.triton.latents import write_latents
from attn_core.ops.triton.merge import merge_states
from attn_core.ops.triton.read import read_pages
from attn_core.ops.triton.sparse_write import write_latents_and_index
from attn_core.ops.triton.vertical_slash import attend_lists, to_lists
from attn_core.ops.vertical_slash import Part, VerticalSlash
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import CacheView, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.kinds import Family, Phase
from attn_core.testing.cases import Case, RaggedCase
from launch_site import Chip, Site
from linear_sites import LINEAR

META = torch.device("meta")
TREE = (-1, 0, 0, 1, 1, 2, 5, 5)
# Shared memory that a program may take, in KiB; Triton itself looks only when a kernel is loaded.
SHARED = {
    "sm75": 64,
    "sm80": 163,
    "sm89": 99,
    "sm90": 227,
    "sm100": 227,
    "sm120": 99,
    "gfx942": 64,
    "gfx950": 160,
}
Launch = Callable[[Chip], object]


def chip(arch: str, family: Family = "softmax") -> Chip:
    """Return a chip, "sm90" or "gfx942", with the Triton that is installed."""
    spec, libraries = load_plugins().get("triton", family), {"triton": triton.__version__}
    return Chip(spec=spec, arch=arch, libraries=libraries, on=META)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


@triton.jit
def _greedy(x, M: tl.constexpr, N: tl.constexpr):
    y = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    z = tl.dot(y, tl.trans(y))
    tl.store(x + tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :], z)


def greedy(chip):
    """Launch what takes too much of everything: what is looked for is also seen."""
    warps = 8 if chip.arch.startswith("sm") else 2  # any fewer take long to compile
    _greedy[(1,)](meta(128, 512, dtype=torch.float16), M=128, N=512, num_warps=warps)


def vertical_slash(chip):
    """Launch the lists and the attention of a sparse prompt, over one KV head of Qwen2.5-7B-1M."""
    part = Part(0, 4096, 0, 4096)
    lines = VerticalSlash(
        *(torch.empty(7, n, dtype=torch.int32, device="meta") for n in (1000, 512))
    )
    lists = to_lists(lines, part)
    q, k, v = meta(4096, 7, 128), meta(4096, 4, 128)[:, 0], meta(4096, 4, 128)[:, 0]
    attend_lists(q, k, v, lists, part, 0.1)


def merge(chip):
    merge_states(meta(2, 512, 32, 128), meta(2, 512, 32, dtype=torch.float32))


def write(store, layout, chip, *, tensor_scales=False):
    """Launch for new tokens of Llama's heads, whatever a chip's backends store."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=1.0
    )
    pool = KVPool(
        [layer],
        num_pages=2,
        page_size=64,
        kv_cache_dtype=store,
        device=META,
        layout=layout,
        scales={0: (meta(1, dtype=torch.float32),) * 2} if tensor_scales else None,
    )
    slots = meta(70, dtype=torch.int64)
    write_kv(pool.layer(0), meta(70, 8, 128), meta(70, 8, 128), slots)


def write_packed(chip):
    """Launch for new latents of sparse MLA in FP8."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=2, page_size=64, kv_cache_dtype="fp8_e4m3", device=META, kind="dsa"
    )
    write_latents(pool.layer(0), meta(70, 1, 576), None, meta(70, dtype=torch.int64))


def write_keys(index_dtype, chip):
    """Launch for new index keys of sparse MLA."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=2, page_size=64, kv_cache_dtype="bf16", device=META, kind="dsa",
        index_dim=128, index_dtype=index_dtype,
    )  # fmt: skip
    write_index(pool.layer(0), meta(70, 128), meta(70, dtype=torch.int64))


def write_together(store, chip):
    """Launch for new latents and index keys of sparse MLA at once."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=2, page_size=64, kv_cache_dtype=store, device=META, kind="dsa",
        index_dim=128, index_dtype="fp8_e4m3",
    )  # fmt: skip
    slots = meta(70, dtype=torch.int64)
    write_latents_and_index(pool.layer(0), meta(70, 128), meta(70, 1, 576), slots)


def score(chip):
    """Launch for e4m3 queries of a long prompt over FP8 index keys, in DeepSeek-V3.2's shape."""
    Site(case=extend(**DSA)).row(chip)  # raises NotDeclared where there is no such row
    layer = AttentionLayer(
        layer_id=0, num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=2, page_size=64, kv_cache_dtype="bf16", device=META, kind="dsa",
        index_dim=128, index_dtype="fp8_e4m3",
    )  # fmt: skip
    table, lengths, ends = (meta(*shape, dtype=torch.int32) for shape in ((1, 64), (1,), (2,)))
    view = CacheView(page_table=table, seq_lens=lengths, out_cache_loc=None, max_seq_len=4096)
    q, weights = meta(300, 64, 128, dtype=torch.float8_e4m3fn), meta(300, 64, dtype=torch.float32)
    scores, requests = meta(300, 4096, dtype=torch.float32), meta(300, dtype=torch.int32)
    inputs = SparsePass(view, ends, requests, queries=300)
    score_queries(q, weights, pool.layer(0), inputs, scores, 0, 300, 2048, arch=chip.arch)


def read(store, kind, chip):
    """Launch for pages of Llama's heads, or of DeepSeek's latents."""
    heads, dim = (1, 576) if kind == "mla" else (8, 128)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=32, num_kv_heads=heads, head_dim=dim, v_head_dim=dim, scale=1.0
    )
    pool = KVPool([layer], num_pages=2, page_size=64, kv_cache_dtype=store, device=META, kind=kind)
    read_pages(pool.layer(0), meta(7, dtype=torch.int64), torch.bfloat16)


def gather(chip):
    """Launch for the pages of a prompt over FP8 latents of sparse MLA, and its selected slots."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=2, page_size=64, kv_cache_dtype="fp8_e4m3", device=META, kind="dsa"
    )
    table, lengths, slots = (meta(*x, dtype=torch.int32) for x in ((2, 64), (2,), (70, 2048)))
    gather_pages(pool.layer(0), table, lengths, 4096, slots, torch.bfloat16)


def decode(**more):
    return replace(_DECODE, **more)


def extend(**more):
    return replace(_DECODE, **{"mode": ForwardMode.EXTEND, "query_lens": (64, 64), **more})


def verify(**more):
    trees = {"query_lens": (8, 8), "trees": (TREE, TREE)}
    return replace(_DECODE, mode=ForwardMode.TARGET_VERIFY, **{**trees, **more})


def short(case, chip):
    """Launch for requests that are not split, as on a device."""
    with mock.patch.object(scheduler, "unsplit_keys_on", return_value=UNSPLIT_KEYS):
        Site(case=replace(case, seq_lens=(70, 64)))(chip)


# Llama-3.1-8B; the longest request is cut, in deterministic mode too
_DECODE = Case(
    feature="",
    mode=ForwardMode.DECODE,
    query_lens=(1, 1),
    seq_lens=(2000, 64),
    heads=(32, 8),
    dims=(128, 128),
)
MLA = {"kind": "mla", "heads": (128, 1), "dims": (576, 512)}
QWEN_1M = DualChunk(chunk_size=262144, local_size=8192)
DSA = {
    **MLA, "kind": "dsa", "index_topk": 2048, "index_shape": (64, 128), "seq_lens": (3000, 64),
    "index_dtype": "fp8_e4m3",
}  # fmt: skip
ODDITIES = {"window": 33, "sinks": True, "dims": (64, 64), "heads": (64, 8)}  # gpt-oss

SIXTEEN = {"query_lens": (8,) * 16, "seq_lens": (2000, *(64,) * 15)}  # requests
FP4 = {"kv_dtype": "fp4_e2m1", "k_scale": 0.5}

# What serving spends its time in.
HOT: dict[str, Site] = {
    "decode": Site(case=decode()),
    "decode-page-1": Site(case=decode(), page_size=1),
    "decode-fp8": Site(case=decode(kv_dtype="fp8_e4m3", k_scale=0.5)),
    "decode-fp4": Site(case=decode(**FP4)),
    "decode-fp4-64": Site(case=decode(**FP4, dims=(64, 64))),
    "decode-fp4-256": Site(case=decode(**FP4, dims=(256, 256), heads=(16, 2))),
    "verify-fp4": Site(case=verify(**FP4), page_size=16),
    "mla-decode-fp4": Site(case=decode(**MLA, **FP4)),
    "mla-decode-16-heads-fp4": Site(case=decode(**(MLA | {"heads": (16, 1)}), **FP4)),
    "extend-fp4": Site(case=extend(**FP4)),
    "extend": Site(case=extend()),
    "extend-page-1": Site(case=extend(), page_size=1),
    "prefill": Site(case=extend(query_lens=(2000, 64)), page_size=1),
    "verify-tree": Site(case=verify(), page_size=1),
    "verify-chain": Site(case=verify(trees=None, query_lens=(4, 4))),
    "decode-gpt-oss": Site(case=decode(**ODDITIES)),
    "extend-gpt-oss": Site(case=extend(**ODDITIES)),
    "mla-decode": Site(case=decode(**MLA)),
    "mla-decode-16-heads": Site(case=decode(**(MLA | {"heads": (16, 1)}))),
    "mla-decode-fp8": Site(case=decode(**MLA, kv_dtype="fp8_e4m3")),
    "mla-decode-16-heads-fp8": Site(
        case=decode(**(MLA | {"heads": (16, 1)}), kv_dtype="fp8_e4m3", k_scale=0.5)
    ),
    "dsa-decode": Site(case=decode(**DSA)),
    "dsa-decode-16-heads": Site(case=decode(**(DSA | {"heads": (16, 1)}))),
    "dsa-decode-fp8": Site(case=decode(**DSA, kv_dtype="fp8_e4m3")),
    "dsa-decode-16-heads-fp8": Site(case=decode(**(DSA | {"heads": (16, 1)}), kv_dtype="fp8_e4m3")),
    "dsa-extend": Site(case=extend(**DSA)),
    "dsa-extend-fp8": Site(case=extend(**DSA, kv_dtype="fp8_e4m3")),
    "dsa-extend-bf16-index": Site(case=extend(**(DSA | {"index_dtype": "bf16"}))),
}
_LENS = {"query_lens": (64,), "key_lens": (64,)}
_WIDE = RaggedCase(feature="", kind="mla", causal=True, heads=(16, 16), dims=(192, 128), **_LENS)
_TOWER = RaggedCase(feature="", heads=(16, 16), dims=(80, 80), **_LENS)
MORE: dict[str, Site] = {
    "decode-shared": Site(case=decode(), shared_prefix=True),
    "decode-shared-page-1": Site(case=decode(), page_size=1, shared_prefix=True),
    "decode-shared-fp8": Site(case=decode(kv_dtype="fp8_e4m3", k_scale=0.5), shared_prefix=True),
    "mla-decode-shared": Site(case=decode(**(MLA | {"heads": (16, 1)})), shared_prefix=True),
    "verify-shared": Site(
        case=verify(**(SIXTEEN | {"query_lens": (4,) * 16}), trees=(TREE[:4],) * 16),
        page_size=16,
        shared_prefix=True,
    ),
    "verify-shared-56-rows": Site(
        case=verify(**SIXTEEN, trees=(TREE,) * 16, heads=(28, 4)), shared_prefix=True
    ),
    "verify-56-rows": Site(case=verify(**SIXTEEN, trees=None, heads=(28, 4))),
    "decode-fixed": Site(case=decode(), deterministic=True),
    "extend-fixed": Site(case=extend(), deterministic=True),
    "decode-fp16": Site(case=decode(), dtype="fp16"),
    "decode-fp32": Site(case=decode(), dtype="fp32"),
    "decode-fp4-80": Site(case=decode(**FP4, dims=(80, 80))),
    "decode-shared-fp4": Site(case=decode(**FP4), shared_prefix=True),
    "mla-extend-fp4": Site(case=extend(**MLA, **FP4)),
    "decode-e5m2": Site(case=decode(kv_dtype="fp8_e5m2")),
    "decode-256": Site(case=decode(dims=(256, 256), heads=(8, 4), logit_cap=50.0)),
    "decode-512-fp32": Site(case=decode(dims=(512, 512)), dtype="fp32"),
    "extend-512": Site(case=extend(dims=(512, 512))),
    "decode-80": Site(case=decode(dims=(80, 80), heads=(32, 32))),
    "decode-cross": Site(case=decode(encoder_lens=(70, 20))),
    "extend-cross": Site(case=extend(encoder_lens=(300, 20))),
    "extend-1k": Site(case=extend(seq_lens=(1000, 64))),
    "extend-1k-page-1": Site(case=extend(seq_lens=(1000, 64)), page_size=1),
    "extend-fp32": Site(case=extend(), dtype="fp32"),
    "extend-fp8": Site(case=extend(kv_dtype="fp8_e4m3", k_scale=0.5)),
    "extend-256": Site(case=extend(dims=(256, 256), heads=(8, 4), logit_cap=50.0)),
    "extend-page-16": Site(case=extend(), page_size=16),
    "extend-256-cut": Site(case=extend(dims=(256, 256), heads=(16, 2), logit_cap=50.0)),
    "decode-dual-chunk": Site(case=decode(dual_chunk=QWEN_1M)),
    "extend-dual-chunk": Site(case=extend(dual_chunk=QWEN_1M)),
    "verify-tree-gpt-oss": Site(case=verify(**ODDITIES), page_size=16),
    "encoder": Site(case=_TOWER),
    "encoder-128": Site(case=replace(_TOWER, dims=(128, 128), query_lens=(300,), key_lens=(300,))),
    "vision": Site(case=replace(_TOWER, phase=Phase.ENCODE)),
    "mla-extend": Site(case=extend(**MLA)),
    "mla-extend-fp8": Site(case=extend(**MLA, kv_dtype="fp8_e4m3")),
    "mla-decode-e5m2": Site(case=decode(**MLA, kv_dtype="fp8_e5m2")),
    "mla-verify-chain": Site(case=verify(trees=None, query_lens=(4, 4), **MLA)),
    "mla-verify-tree": Site(case=verify(**MLA), page_size=1),
    "dsa-decode-fp32": Site(case=decode(**DSA), dtype="fp32"),
    "dsa-decode-fixed": Site(case=decode(**DSA), deterministic=True),
    "dsa-verify-chain": Site(case=verify(trees=None, query_lens=(4, 4), **DSA)),
    "dsa-ragged": Site(case=replace(_WIDE, kind="dsa")),
    "mla-decode-fp32": Site(case=decode(**MLA), dtype="fp32"),
    "mla-decode-fixed": Site(case=decode(**MLA), deterministic=True),
    "mla-ragged": Site(case=_WIDE),
}
OTHERS: dict[str, Launch] = {
    "decode-short": partial(short, decode()),
    "extend-short": partial(short, extend()),
    "extend-short-64": partial(short, extend(dims=(64, 64))),
    "decode-short-256": partial(short, decode(dims=(256, 256), heads=(8, 4))),
    "mla-decode-short": partial(short, decode(**MLA)),
}
WRITES: dict[str, Launch] = {
    "write": partial(write, "bf16", "NHD"),
    "write-fp8": partial(write, "fp8_e4m3", "HND"),
    "write-e5m2": partial(write, "fp8_e5m2", "NHD"),
    "write-fp4": partial(write, "fp4_e2m1", "NHD"),
    "write-latents": write_packed,
    "write-index": partial(write_keys, "bf16"),
    "write-index-fp8": partial(write_keys, "fp8_e4m3"),
    "write-latents-index": partial(write_together, "bf16"),
    "write-latents-index-fp8": partial(write_together, "fp8_e4m3"),
    "write-tensor-scales": partial(write, "fp8_e4m3", "NHD", tensor_scales=True),
    "gather-pages": gather,
    "read-fp8": partial(read, "fp8_e4m3", "mla"),
    "read-e5m2": partial(read, "fp8_e5m2", "mha"),
    "read-fp4": partial(read, "fp4_e2m1", "mha"),
    "read-fp4-latents": partial(read, "fp4_e2m1", "mla"),
}
SITES: dict[str, Launch] = {
    "merge": merge,
    "vertical-slash": vertical_slash,
    "score-prompts": score,
    **WRITES,
    "greedy": greedy,
    **HOT,
    **MORE,
    **OTHERS,
    **LINEAR,
}
GROUPS = {
    "quick": ("merge", "write-fp8", "decode", "extend", "mla-decode"),
    "hot": ("merge", *WRITES, *HOT),
    "more": ("vertical-slash", "score-prompts", *MORE, *OTHERS),
    "linear": (*LINEAR,),
}
