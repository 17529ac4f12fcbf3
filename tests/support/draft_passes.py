"""The decode steps of a draft model as SGLang makes them, and a dense softmax beside them."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from engine_passes import dense
from sglang.kernels.ops.speculative.cache_locs import assign_draft_cache_locs_contiguous
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_common import duplicate_prefix_tail_to_draft_branches


@dataclass
class Drafts:
    """The decode steps of a draft model: rows of the token table, their lengths, the tree."""

    rows: tuple[int, ...]
    prefix: tuple[int, ...]
    topk: int
    num_steps: int  # drafts of a branch; the last needs no pass

    def batch(self, runner):
        """Return SGLang's ForwardBatch, whose slots SGLang's own worker has assigned."""
        table, page = runner.req_to_token_pool.req_to_token, runner.page_size
        rows, prefix = torch.tensor(self.rows), torch.tensor(self.prefix)
        size, each = len(rows), self.topk * self.num_steps
        slots = torch.empty(size * each, dtype=torch.int64)
        if page == 1 or self.topk == 1:
            assign_draft_cache_locs_contiguous[(size,)](
                rows, table, prefix, slots, table.shape[1], self.topk, self.num_steps
            )
        else:  # as eagle_worker_common.prepare_for_draft does
            tail = prefix % page
            pages = (tail + self.num_steps + page - 1) // page
            branch = torch.arange(self.topk)[:, None]
            first = prefix[:, None, None] + branch * (pages * page)[:, None, None]
            slots = (
                table[rows]
                .long()
                .gather(1, (first + torch.arange(self.num_steps)).view(size, each))
            )
            duplicate_prefix_tail_to_draft_branches(
                runner.token_to_kv_pool, table[rows].long(), prefix - tail, tail, pages,
                self.topk, page,
            )  # fmt: skip
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            seq_lens=prefix,
            seq_lens_cpu=None,
            req_pool_indices=rows,
            out_cache_loc=slots.flatten(),
            positions=prefix.repeat_interleave(self.topk),
            spec_info=EagleDraftInput(),
        )


def draft_error(backend, run, made, module, *, window=None, plan=None, seed=0):
    """Run the steps of a draft model's layer; return the largest difference from dense softmax.

    plan: how the steps are planned, `backend.init_forward_metadata` by default.
    """
    generator = torch.Generator().manual_seed(seed)
    pool, table = run.token_to_kv_pool, run.req_to_token_pool.req_to_token
    heads, kv, d = module.tp_q_head_num, module.tp_k_head_num, module.qk_head_dim
    latent = type(pool).__name__ == "MLATokenToKVPool"
    keys = []
    for row, prefix in zip(made.rows, made.prefix, strict=True):
        k, v = torch.randn(2, prefix, kv, d, generator=generator)
        v = k[..., : module.v_head_dim] if latent else v
        slots = table[row, :prefix].long()
        if hasattr(pool, "full_to_swa_index_mapping") and window is not None:
            slots = pool.full_to_swa_index_mapping[slots]
        pool.get_key_buffer(module.layer_id)[slots] = k
        if not latent:
            pool.get_value_buffer(module.layer_id)[slots] = v
        keys += [(k, v)] * made.topk
    batch = made.batch(run)
    size = len(made.rows)
    steps = per_step_draft_out_cache_loc(batch.out_cache_loc, size, made.topk, made.num_steps)
    (plan or backend.init_forward_metadata)(batch)
    worst = 0.0
    for step, part in enumerate(backend.attn_backends):
        planned = len(part._pass[0].views["full"].out_cache_loc)  # a graph's padding included
        q = torch.randn(planned, heads, d, generator=generator)
        k, v = torch.randn(2, planned, kv, d, generator=generator)
        v = k[..., : module.v_head_dim] if latent else v
        assert part._pass[0].views["full"].out_cache_loc[: len(keys)].equal(steps[step])
        batch.out_cache_loc = steps[step]
        out = part.forward_decode(q.flatten(1), k, v, module, batch)
        out = out.view(planned, heads, module.v_head_dim)
        for i, (before, values) in enumerate(keys):
            keys[i] = torch.cat([before, k[i : i + 1]]), torch.cat([values, v[i : i + 1]])
            tokens = torch.arange(len(keys[i][0]))
            seen = (tokens >= (0 if window is None else len(tokens) - window))[None]
            expected = dense(q[i : i + 1], *keys[i], seen, module.scaling)
            worst = max(worst, (out[i] - expected[0]).abs().max().item())
    return worst
