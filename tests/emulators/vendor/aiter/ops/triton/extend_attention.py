"""Extend: new tokens beside a prefix of single tokens, in causal order or by a mask."""

import torch
from aiter_checks import fill
from attn_reference import attend

BLOCK_M = 64  # queries of one program


def extend_attention_fwd(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    custom_mask,
    is_causal,
    mask_indptr,
    max_len_extend,
    sm_scale=None,
    logit_cap=0.0,
    skip_prefix_custom_mask=True,
    config=None,
):
    assert config is None, "not emulated"
    assert all(t.stride(-1) == 1 for t in (q_extend, k_extend, v_extend, o_extend, k_buffer))
    starts, prefixes = qo_indptr.tolist(), kv_indptr.tolist()
    keys, values, masks = [], [], []
    for b in range(len(starts) - 1):
        new = slice(starts[b], starts[b + 1])
        count, before = starts[b + 1] - starts[b], prefixes[b + 1] - prefixes[b]
        assert count <= max_len_extend, "max_len_extend is below a request: not computed"
        slots = kv_indices[prefixes[b] : prefixes[b + 1]].long()
        keys.append(torch.cat([k_buffer[slots], k_extend[new]]))
        values.append(torch.cat([v_buffer[slots], v_extend[new]]))
        row, column = torch.arange(count)[:, None], torch.arange(before + count)
        seen = torch.ones(count, before + count, dtype=torch.bool)
        if custom_mask is not None:
            first = int(mask_indptr[b])
            flat = custom_mask[first : first + seen.numel()].view(seen.shape).bool()
            skipped = (column < before) & torch.tensor(skip_prefix_custom_mask)
            seen = flat | skipped
            if is_causal:  # the blocks of keys after a block of queries are skipped
                seen &= column < before + (row // BLOCK_M + 1) * BLOCK_M
        elif is_causal:
            seen = column <= before + row
        masks.append(seen)
    result, _ = attend(
        q_extend,
        keys,
        values,
        query_lens=qo_indptr.diff().tolist(),
        scale=sm_scale or q_extend.shape[-1] ** -0.5,
        softcap=logit_cap,
        masks=masks,
    )
    fill(o_extend, result)
