"""Random requests that share pages: one plan serves all, and none changes another's bits."""

import itertools
import random

import pytest
import torch
from attn_core.runtime.batch import ForwardBatch, ForwardMode

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton import shared as SHARED
from sharers import GRANULE, Sharers, expected_spans, planned_spans, random_trees, verify
from triton_passes import DEVICE, make_layer

M = ForwardMode
FORMS = ("all equal", "one alone", "levels", "anyhow")
LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def small_granule(monkeypatch):
    """Share from 64 keys on, and split short requests wherever this runs."""
    monkeypatch.setattr(SHARED, "shared_granule", lambda *args: GRANULE)
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)
    monkeypatch.setattr(scheduler, "KEYS_PER_PARTIAL", GRANULE)


def draw(rng, form, count, page, most=330):
    """Return lengths, most of which end inside a page, and the pages shared with the one before."""
    lengths = [rng.randint(1, most) for _ in range(count)]
    if form == "all equal":
        lengths = [rng.randint(most // 2, most)] * count
    if form == "levels":
        lengths = [rng.randint(2 * most // 3, most) for _ in range(count)]
    common = [0] + [min(pair) // page for pair in itertools.pairwise(lengths)]
    if form == "one alone":
        common[rng.randrange(count)] = 0
    if form == "levels":
        low = -(-GRANULE // page)
        common = [n if b % 2 else min(n, low) for b, n in enumerate(common)]
    if form == "anyhow":
        common = [rng.choice([0, rng.randint(0, n)]) for n in common]
    return lengths, [0, *common[1:]]


@pytest.mark.parametrize(
    ("drafts", "seed"),
    [(1, 1), (3, 0), (8, 0), pytest.param(1, 0, marks=LONG), pytest.param(3, 1, marks=LONG)],
)
def test_one_captured_plan_serves_whatever_is_shared(drafts, seed):
    """Tables and lengths are overwritten before each replay, whose groups are others."""
    rng, count = random.Random(10 * seed + drafts), 5
    page, layer = rng.choice([5, 16, 48]), make_layer(rng.choice([1, 2]), 4, 32)
    trees = random_trees(count, drafts, seed) if drafts == 8 else None
    mode, spec = M.DECODE, None
    if drafts > 1:
        mode, spec = M.TARGET_VERIFY, verify(drafts, trees)
    longest, rows = 330, [drafts] * count
    first = Sharers(layer, [longest] * count, [0] * count, page=page)
    config = {} if spec is None else {"topk": spec.topk, "num_draft_tokens": drafts}
    backend = first.backend(shared_prefix=True, multiprocessors=rng.choice([1, 3, 40]), **config)
    backend.init_cuda_graph_state(count + 3, (count + 3) * drafts)
    batch = first.batch(rows, mode=mode, spec=spec)
    plan = backend.init_forward_metadata_capture_cuda_graph(batch)
    view, [schedule] = batch.views["full"], plan.values()
    found = []
    for form in FORMS[1:3] if drafts == 8 else (*FORMS, "anyhow", "one alone"):
        lengths, shared = draw(rng, form, count, page)
        lengths = [max(n, drafts) for n in lengths]
        shared = [0] + [
            min(pages, (min(pair) - drafts) // page)
            for pages, pair in zip(shared[1:], itertools.pairwise(lengths), strict=True)
        ]
        other = Sharers(layer, lengths, shared, page=page)
        view.page_table.fill_(0)
        view.page_table[:, : other.table.shape[1]] = other.table
        view.seq_lens.copy_(torch.tensor(lengths))
        backend.init_forward_metadata_replay_cuda_graph(batch, plan)
        q = other.draw(sum(rows), seed)
        got = backend.forward(q, None, None, layer, other.cache, batch, plan, return_lse=True)
        other.check(got, q, rows, trees=trees)
        groups, _ = planned_spans(schedule.split, count)
        assert groups == expected_spans(other, drafts)
        found += groups
    assert {level for *_, level in found} == {1, 2}


def bits(sharers, backend, rows, q):
    """Return the bits of out and LSE of some requests of one token, in the order of `rows`."""
    batch = ForwardBatch.build(
        M.DECODE,
        query_lens=[1] * len(rows),
        seq_lens=[sharers.lengths[b] for b in rows],
        page_table=sharers.table[rows],
        page_size=sharers.page,
    )
    plan = backend.init_forward_metadata(batch)
    one = q[torch.tensor(rows, device=DEVICE)]
    out, lse = backend.forward(
        one, None, None, sharers.layer, sharers.cache, batch, plan, return_lse=True
    )
    parts = zip(out.flatten(1), lse, strict=True)
    return [torch.cat(part).view(torch.int32) for part in parts]


@pytest.mark.parametrize("form", [*FORMS[2:], *(pytest.param(x, marks=LONG) for x in FORMS[:2])])
def test_bits_of_a_request_do_not_depend_on_who_shares_in_deterministic_mode(form):
    """Alone, among sharers, in another order, and in a batch so large that merges would differ."""
    rng, count = random.Random(form), 6
    lengths, shared = draw(rng, form, count, 16, most=700)
    lengths[-1] = max(lengths[-1], 650)  # one is cut into many parts
    layer = make_layer(1, 2, 16)
    sharers = Sharers(layer, lengths, shared, page=16, dtype="fp32")
    q = sharers.draw(count)
    config = {"deterministic": True, "shared_prefix": True}
    alone = sharers.backend(**config)
    right = [bits(sharers, alone, [b], q)[0] for b in range(count)]
    batches = [list(range(count)), rng.sample(range(count), count), rng.sample(range(count), 3)]
    batches.append([rng.randrange(count) for _ in range(20)])  # requests twice, side by side
    for rows in batches:
        backend = sharers.backend(**config, multiprocessors=rng.choice([3, 40]))
        for b, got in zip(rows, bits(sharers, backend, rows, q), strict=True):
            assert torch.equal(got, right[b]), (rows, b)


def test_a_plan_serves_a_batch_of_the_same_lengths_and_other_pages():
    """Requests that share pages, then the same ones with pages of their own, and back."""
    layer, lengths = make_layer(2, 2, 32), [200, 190]
    alone, sharing = (Sharers(layer, lengths, [0, pages], page=16) for pages in (0, 11))
    backend = sharing.backend(shared_prefix=True, multiprocessors=3)
    batches = [x.batch([1, 1], mode=M.DECODE) for x in (alone, sharing)]
    q = alone.draw(2)
    for planned in batches:
        plan = backend.init_forward_metadata(planned)
        for requests, batch in zip((alone, sharing, alone, sharing), 2 * batches, strict=True):
            tokens = (q, None, None, layer, requests.cache, batch, plan)
            requests.check(backend.forward(*tokens, return_lse=True), q, [1, 1])
