"""Tiles of the same keys run side by side: a part of the keys is that of one program for each."""

import pytest
import torch
from attn_core.runtime.batch import ForwardMode, SpecInfo

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton.tuning import Launch
from triton_passes import Requests, make_layer

DRAFTS = 6


@pytest.mark.parametrize("merged", [1, 4])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("processors", [1, 3, 7])
def test_row_blocks_share_the_cuts_of_their_keys(processors, deterministic, merged, monkeypatch):
    """Three tiles of 32 rows for each of two heads, the last one half full; one request is cut."""
    launch = Launch(block_m=32, block_n=32, warps=4, stages=1)
    monkeypatch.setattr(scheduler, "decode_launch", lambda *a, **k: launch)
    monkeypatch.setattr(scheduler, "merge_tile", lambda *a: (16, merged, 2, 1))
    requests = Requests(make_layer(heads=2, group=13, dim=16), (290, 6, 40), page=16, dtype="fp32")
    spec = SpecInfo(topk=1, num_draft_tokens=DRAFTS)
    batch = requests.batch([DRAFTS] * 3, mode=ForwardMode.TARGET_VERIFY, spec=spec)
    config = {"deterministic": deterministic, "multiprocessors": processors}
    backend = requests.backend(**config)
    [schedule] = backend.init_forward_metadata(batch).values()
    cuts = schedule.split.cuts
    assert (cuts.row_blocks, cuts.programs) == (3, {1: 3, 3: 3, 7: 6}[processors])
    q = requests.draw(3 * DRAFTS)
    got = requests.attend(batch, q, **config)
    requests.check(got, q, [DRAFTS] * 3)
    assert bool(torch.isfinite(got[0]).all())
