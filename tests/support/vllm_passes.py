"""Passes as vLLM makes them, through its own layers and builders, and a dense softmax beside."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

BLOCK, BLOCKS, CONTEXT, ROWS = 16, 48, 160, 8


def engine(drafts=0, use_mla=False, kv_cache_dtype="auto", **changed):
    """Return vLLM's configuration of a small model; `changed` are fields of its parts."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.float32, max_model_len=CONTEXT, is_mm_prefix_lm=False, use_mla=use_mla,
        rswa_window=None,
    )  # fmt: skip
    config.scheduler_config.max_num_seqs = ROWS
    config.scheduler_config.max_num_batched_tokens = 256
    config.cache_config.block_size = BLOCK
    config.cache_config.cache_dtype = kv_cache_dtype
    if drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False
        )
    for name, value in changed.items():
        part, _, attribute = name.partition("__")
        setattr(getattr(config, part), attribute, value)
    return config


def attention(config, name="layers.0.attn", heads=4, kv_heads=2, dim=32, **changed):
    """Return vLLM's layer of attention, with keys and values of NaN in its cache."""
    with set_current_vllm_config(config):
        module = Attention(
            heads, dim, dim**-0.5, kv_heads, cache_config=config.cache_config, prefix=name,
            **changed,
        )  # fmt: skip
        spec = module.get_kv_cache_spec(config)
        shape = module.attn_backend.get_kv_cache_shape(BLOCKS, BLOCK, kv_heads, dim)
    cache = torch.full(shape, float("nan"))
    module.kv_cache = (
        cache if spec.dtype.itemsize > 1 else cache.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    return module


def builder(config, *modules):
    """Return the builder of layers that share a block table."""
    with set_current_vllm_config(config):
        spec = modules[0].get_kv_cache_spec(config)
        create = modules[0].attn_backend.get_builder_cls()
        return create(spec, [m.layer_name for m in modules], config, torch.device("cpu"))


@dataclass
class Pass:
    """Requests with so many new tokens after so many cached ones, and rows of padding.

    padding: rows of the pass whose slot is -1. idle: requests without tokens behind the others.
    """

    new: tuple[int, ...]
    cached: tuple[int, ...]
    padding: int = 0
    idle: int = 0
    tables: torch.Tensor = field(init=False)

    def __post_init__(self):
        columns = CONTEXT // BLOCK
        blocks = torch.randperm(BLOCKS - 1) + 1  # block 0 is vLLM's null block
        self.tables = torch.zeros(len(self.new) + self.idle, columns, dtype=torch.int32)
        for row, (new, cached) in enumerate(zip(self.new, self.cached, strict=True)):
            used = -(-(new + cached) // BLOCK)
            self.tables[row, :used] = blocks[:used]
            blocks = blocks[used:]

    @property
    def lengths(self):
        return [n + c for n, c in zip(self.new, self.cached, strict=True)]

    def slots(self, row, first, last):
        """Return the slots of a request's tokens, from `first` to before `last`."""
        at = torch.arange(first, last)
        return self.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK

    def common(self):
        """Return the pass as vLLM describes it."""
        rows = range(len(self.new))
        starts = torch.tensor([0, *self.new, *[0] * self.idle]).cumsum(0).int()
        slots = [self.slots(r, self.cached[r], self.lengths[r]) for r in rows]
        positions = [torch.arange(self.cached[r], self.lengths[r]) for r in rows]
        lengths = torch.tensor([*self.lengths, *[0] * self.idle], dtype=torch.int32)
        most = max(self.new)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=sum(self.new) + self.idle * most,
            max_query_len=most,
            max_seq_len=max(self.lengths),
            block_table_tensor=self.tables,
            slot_mapping=torch.cat([*slots, torch.full((self.padding,), -1)]),
            positions=torch.cat([*positions, torch.zeros(self.idle * most, dtype=torch.int64)]),
            seq_lens_cpu_upper_bound=lengths.clone(),
        )


@contextmanager
def forward_context(config, metadata, common, *modules):
    """Enter a pass of vLLM: what its layers find their metadata and slots in."""
    names = [m.layer_name for m in modules]
    with set_current_vllm_config(config), set_forward_context(
        dict.fromkeys(names, metadata), config,
        slot_mapping=dict.fromkeys(names, common.slot_mapping),
    ):  # fmt: skip
        yield


def dense(q, keys, values, scale, window=None, cap=None, sinks=None):
    """Attend in float64: q [T, Hq, D], the last tokens of keys [S, Hkv, D] → [T, Hq, Dv]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(len(keys))
    own = at[len(keys) - len(q) :, None]
    seen = at <= own
    if window is not None:
        seen &= at > own - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hts,shd->thd", weights, values)


def error(config, plan, made, module, **expected):
    """Run a pass through vLLM's layer; return the largest difference from a dense softmax."""
    common = made.common()
    metadata = plan.build(0, common)
    return run(config, metadata, common, made, module, **expected)


def run(config, metadata, common, made, module, **expected):
    """Run a planned pass; check that the cache holds the new tokens and nothing else changed."""
    heads, kv_heads, dim = module.num_heads, module.num_kv_heads, module.head_size
    tokens = sum(made.new) + max(made.padding, made.idle * max(made.new))
    q = torch.randn(tokens, heads * dim)
    k, v = (torch.randn(tokens, kv_heads * dim) for _ in range(2))
    histories, start = [], 0
    for row, (new, cached) in enumerate(zip(made.new, made.cached, strict=True)):
        prefix = torch.randn(2, cached, kv_heads, dim)
        slots = made.slots(row, 0, cached)
        module.kv_cache[:, slots // BLOCK, slots % BLOCK] = prefix
        own = [x[start : start + new].view(new, kv_heads, dim) for x in (k, v)]
        histories.append([torch.cat([p, x]) for p, x in zip(prefix, own, strict=True)])
        start += new
    expected_cache = module.kv_cache.clone()
    slots = common.slot_mapping[: sum(made.new)]
    for side, x in enumerate((k, v)):
        expected_cache[side, slots // BLOCK, slots % BLOCK] = x[: sum(made.new)].view(
            -1, kv_heads, dim
        )
    with forward_context(config, metadata, common, module):
        out = module(q, k, v).view(tokens, heads, dim)
    torch.testing.assert_close(module.kv_cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    worst, start = 0.0, 0
    for (keys, values), new in zip(histories, made.new, strict=True):
        result = out[start : start + new].double()
        here = dense(
            q[start : start + new].view(new, heads, dim),
            keys,
            values,
            module.impl.scale,
            **expected,
        )
        assert result.isfinite().all()
        worst = max(worst, (result - here).abs().max().item())
        start += new
    return worst
