"""Passes that SGLang may make and that no case names: drawn, against a dense softmax."""

import random

import pytest
import torch
from attn_core.integrations.sglang.backend import AttnCoreBackend
from engine_passes import (
    CONTEXT,
    ROWS,
    Pass,
    attention,
    error,
    mha_pool,
    mla_pool,
    runner,
    swa_pool,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

N = 5  # drafts of a request
EDGES = (0, 1, 15, 16, 17, 63, 64, 65)
MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)


def trees(draw, requests):
    """Return trees of N drafts, bool [requests, N, N]: each draft sees its ancestors."""
    found = torch.eye(N, dtype=torch.bool).repeat(requests, 1, 1)
    for tree in found:
        for node in range(1, N):
            tree[node] |= tree[draw.randrange(node)]
    return found


def drawn(seed):
    """Return a pass, the arguments of a server and its page size, the window and the cap."""
    draw = random.Random(seed)
    mode = draw.choice(MODES)
    rows = tuple(draw.sample(range(1, ROWS), draw.randint(1, ROWS - 1)))
    new = [1 if mode is ForwardMode.DECODE else N for _ in rows]
    if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        new = [draw.choice((1, 1, 2, 15, 16, 17, draw.randint(1, 60))) for _ in rows]
    prefix = [draw.choice((*EDGES, draw.randint(0, CONTEXT), CONTEXT)) for _ in rows]
    prefix = [min(p, CONTEXT - n) for p, n in zip(prefix, new, strict=True)]
    topk = draw.choice((1, 3)) if mode is ForwardMode.TARGET_VERIFY else 0
    args = {} if not topk else {
        "speculative_algorithm": "EAGLE", "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": N,
    }  # fmt: skip
    made = Pass(
        mode, rows, tuple(prefix), tuple(new), trees(draw, len(rows)) if topk > 1 else None,
        padding=draw.choice((0, 0, 7)) if mode is ForwardMode.EXTEND else 0,
    )  # fmt: skip
    page, window = draw.choice((1, 16, 64)), draw.choice((None, None, 2, 3, 7, 15, 16, 17, 70))
    return made, args, page, window, draw.choice((None, None, 5.0))


def leave_behind(run, made, window):
    """Do as SGLang's prefix cache does with slots that a window has left: they name the dummy."""
    pool, table = run.token_to_kv_pool, run.req_to_token_pool.req_to_token
    pages = pool.full_to_swa_index_mapping
    for row, prefix in zip(made.rows, made.prefix, strict=True):
        gone = max(0, prefix - window + 1) // run.page_size * run.page_size
        pages[table[row, :gone].long()] = 0


@pytest.mark.parametrize("seed", range(16))
def test_a_drawn_pass_is_a_dense_softmax(seed):
    torch.manual_seed(seed)
    made, args, page, window, cap = drawn(seed)
    more = {} if cap is None else {"logit_cap": cap}
    if window is None:
        module = attention(**more)
        run = runner([module], mha_pool(page=page), page, **args)
    else:
        module = attention(0, sliding_window_size=window - 1, **more)
        run = runner([module, attention(1, **more)], swa_pool(page=page), page, **args)
        leave_behind(run, made, window)
    for buffer in (
        run.token_to_kv_pool.get_key_buffer(0),
        run.token_to_kv_pool.get_value_buffer(0),
    ):
        buffer.fill_(torch.nan)  # what no request wrote
    assert error(AttnCoreBackend(run), run, made, module, window=window) < 1e-5


@pytest.mark.parametrize("seed", range(100, 106))
def test_a_drawn_pass_over_latents_is_a_dense_softmax(seed):
    torch.manual_seed(seed)
    made, args, page, _window, _cap = drawn(seed)
    if made.tree is not None:
        made.tree, args["speculative_eagle_topk"] = None, 1
    module = attention(heads=4, kv_heads=1, dim=80, v_head_dim=64)
    run = runner([module], mla_pool(page=page), page, **args)
    run.token_to_kv_pool.get_key_buffer(0).fill_(torch.nan)
    assert error(AttnCoreBackend(run), run, made, module) < 1e-5
