"""Cross attention as SGLang lays it out: an encoder's keys in front of the text, in one row."""

import pytest
import torch
from attn_core import UnsupportedError
from attn_core.integrations.sglang import encoder
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.page_tables import fill_page_table
from engine_passes import Pass, attention, dense, mha_pool, runner
from sglang.srt.model_executor.forward_batch_info import ForwardMode

ROWS, ENCODER = (3, 1, 7), (9, 0, 20)  # the second request has no image


class Case:
    """A text layer and a cross layer over one pool."""

    def __init__(self):
        torch.manual_seed(0)
        self.text, self.cross = attention(0), attention(1, is_cross_attention=True)
        self.run = runner([self.text, self.cross], mha_pool(layers=2), 1)
        self.backend = AttnCoreBackend(self.run)
        self.table = self.run.req_to_token_pool.req_to_token
        self.images = [torch.randn(2, n, 2, 32) for n in ENCODER]
        self.words = [torch.zeros(2, 0, 2, 32) for _ in ROWS]

    def batch(self, mode, new, *, images):
        """Return a pass with `new` words each; images: it brings the encoder's keys too."""
        prefix = [w.shape[1] for w in self.words]
        batch = Pass(mode, ROWS, tuple(prefix), new).batch(self.run)
        parts = zip(ROWS, ENCODER, prefix, new, strict=True)
        slots = [self.table[r, e + p : e + p + n] for r, e, p, n in parts]
        batch.out_cache_loc = torch.cat(slots).long()
        batch.encoder_lens, batch.encoder_lens_cpu = torch.tensor(ENCODER), list(ENCODER)
        slots = [self.table[r, : e if images else 0] for r, e in zip(ROWS, ENCODER, strict=True)]
        batch.encoder_out_cache_loc = torch.cat(slots).long()
        return batch

    def error(self, mode, new, *, images):
        """Run both layers of a pass; return the largest difference from a dense softmax."""
        batch = self.batch(mode, new, images=images)
        self.backend.init_forward_metadata(batch)
        call = self.backend.forward_decode
        q, k, v = torch.randn(3, sum(new), 4, 32)
        k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
        pairs = zip(self.words, torch.stack([k, v]).split(new, 1), strict=True)
        self.words = [torch.cat(pair, 1) for pair in pairs]
        text = call(q.flatten(1), k, v, self.text, batch).view(-1, 4, 32)
        keys = [torch.cat(x) for x in zip(*self.images, strict=True)] if images else (None, None)
        cross = call(q.flatten(1), *keys, self.cross, batch).view(-1, 4, 32)
        worst, begin = 0.0, 0
        for words, image, n in zip(self.words, self.images, new, strict=True):
            rows = slice(begin, begin + n)
            position = torch.arange(words.shape[1])
            seen = position <= position[-n:, None]
            right = dense(q[rows], *words, seen, self.text.scaling)
            worst = max(worst, (text[rows] - right).abs().max().item())
            if image.shape[1]:
                seen = torch.ones(n, image.shape[1], dtype=torch.bool)
                right = dense(q[rows], *image, seen, self.cross.scaling)
                worst = max(worst, (cross[rows] - right).abs().max().item())
            else:
                assert not cross[rows].any()  # no keys
            begin += n
        return worst


def test_text_and_cross_layers_are_dense_softmaxes():
    case = Case()
    assert case.error(ForwardMode.EXTEND, (6, 4, 11), images=True) < 1e-5
    assert case.error(ForwardMode.EXTEND, (3, 2, 1), images=False) < 1e-5  # the next chunk
    assert case.error(ForwardMode.DECODE, (1, 1, 1), images=False) < 1e-5


def test_a_replay_fills_both_views(monkeypatch):
    case = Case()
    case.error(ForwardMode.EXTEND, (6, 4, 11), images=True)
    backend, dispatcher = case.backend, case.backend.dispatcher
    plan = dispatcher.init_forward_metadata  # torch_native has no graphs
    monkeypatch.setattr(dispatcher, "init_cuda_graph_state", lambda *args: None)
    monkeypatch.setattr(dispatcher, "init_forward_metadata_capture_cuda_graph", plan)
    replay = lambda batch, metadata: None  # noqa: E731
    monkeypatch.setattr(dispatcher, "init_forward_metadata_replay_cuda_graph", replay)
    backend.init_cuda_graph_state(4, 4)
    first = case.batch(ForwardMode.DECODE, (1, 1, 1), images=False)
    first.seq_lens, first.encoder_lens = torch.ones(3), torch.ones(3, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    captured = backend._pass[0]
    later = case.batch(ForwardMode.DECODE, (1, 1, 1), images=False)
    backend.init_forward_metadata_out_graph(later)
    cross, full = captured.views["cross"], captured.views["full"]
    assert cross.seq_lens.tolist() == list(ENCODER)
    assert cross.page_table[2, :20].equal(case.table[7, :20])
    assert full.seq_lens.tolist() == [7, 5, 12]
    assert full.page_table[2, :12].equal(case.table[7, 20:32])


def test_the_comparison_sees_text_that_begins_too_early(monkeypatch):
    def broken(*args, starts=None):
        return fill_page_table(*args)

    monkeypatch.setattr(encoder, "fill_page_table", broken)
    case = Case()
    assert case.error(ForwardMode.EXTEND, (6, 4, 11), images=True) > 1e-2


def test_what_cross_attention_cannot_have_is_named():
    layers = [attention(0), attention(1, is_cross_attention=True)]
    with pytest.raises(UnsupportedError, match="--page-size 16"):
        AttnCoreBackend(runner(layers, mha_pool(layers=2, page=16), 16))
    drafts = {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    with pytest.raises(UnsupportedError, match="speculation"):
        AttnCoreBackend(runner(layers, mha_pool(layers=2), 1, **drafts))


def test_a_mask_of_the_model_is_refused():
    case = Case()
    batch = case.batch(ForwardMode.EXTEND, (6, 4, 11), images=True)
    batch.cross_attention_custom_mask = torch.ones(4, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="mask of the model"):
        case.backend.init_forward_metadata(batch)
