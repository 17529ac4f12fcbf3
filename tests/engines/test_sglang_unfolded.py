"""MLA before absorption: SGLang's own chunks of a prefix, merged, against a dense softmax."""

from types import SimpleNamespace

import attn_core
import pytest
import torch
from attn_core import UnsupportedError
from attn_core.integrations.sglang import unfolded
from attn_core.integrations.sglang.backend import AttnCoreBackend
from engine_passes import Pass, attention, dense, mla_pool, runner
from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import ForwardBatchDeepSeekMHAMixin
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

HEADS, D, DV = 4, 48, 32


class EngineBatch(ForwardBatchDeepSeekMHAMixin):
    """A pass with SGLang's own chunks of 16 tokens a request."""

    def __init__(self, values):
        self.__dict__ |= values

    def get_max_chunk_capacity(self):
        return 16 * self.batch_size

    def prepare_chunked_kv_indices(self, device):
        pass  # a Triton kernel; the keys are drawn here


class Case:
    """A layer, a pass and the keys of its requests."""

    def __init__(self, mode=ForwardMode.EXTEND, prefix=(17, 0, 33), new=(6, 19, 1), padding=0):
        torch.manual_seed(0)
        self.absorbed = attention(heads=HEADS, kv_heads=1, dim=80, v_head_dim=64)
        self.module = attention(heads=HEADS, kv_heads=HEADS, dim=D, v_head_dim=DV)
        self.made = Pass(mode, (3, 1, 7)[: len(new)], prefix, new, padding=padding)
        self.run = runner([self.absorbed, self.module], mla_pool(page=16), 16)
        self.backend = AttnCoreBackend(self.run)
        values = vars(self.made.batch(self.run))
        values["extend_prefix_lens"] = torch.tensor(prefix, dtype=torch.int32)
        ragged = self.backend.dispatcher.forward_ragged

        def heads_first(*args, **options):  # as fa3 lays out its log-sum-exp
            result = ragged(*args, **options)
            return (result[0], result[1].T.contiguous().T) if isinstance(result, tuple) else result

        self.backend.dispatcher.forward_ragged = heads_first
        self.batch = EngineBatch(values)
        lengths = [p + n for p, n in zip(prefix, new, strict=True)]
        self.k = [torch.randn(n, HEADS, D) for n in lengths]
        self.v = [torch.randn(n, HEADS, DV) for n in lengths]
        self.q = torch.randn(sum(new) + padding, HEADS, D)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            self.batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
        self.backend.init_forward_metadata(self.batch)

    def part(self, begins, lengths, padding=0):
        """Return the keys and values of one stretch of each request, end to end."""
        return [
            torch.cat(
                [x[b : b + n] for x, b, n in zip(xs, begins, lengths, strict=True)]
                + [torch.zeros(padding, *xs[0].shape[1:])]
            )
            for xs in (self.k, self.v)
        ]

    def call(self, k, v):
        q = self.q.flatten(1)
        return self.backend.forward_extend(q, k, v, self.module, self.batch, save_kv_cache=False)

    def own(self):
        return self.call(*self.part(self.made.prefix, self.made.new, self.made.padding))

    def error(self, out):
        """Return the largest difference from a dense softmax over all keys."""
        out, begin, worst = out.view(-1, HEADS, DV), 0, 0.0
        for request, (k, v, n) in enumerate(zip(self.k, self.v, self.made.new, strict=True)):
            rows = slice(begin, begin + n)
            seen = self.made.seen(request)
            expected = dense(self.q[rows], k, v, seen, self.module.scaling)
            worst = max(worst, (out[rows] - expected).abs().max().item())
            begin += n
        return worst


def merge(out, lse, other, other_lse):
    """Merge two parts by their log-sum-exp, as SGLang's kernel does."""
    total = torch.logaddexp(lse, other_lse)
    weights = (lse - total).exp()[..., None], (other_lse - total).exp()[..., None]
    return out * weights[0] + other * weights[1], total


def in_chunks(case):
    """Return the output of SGLang's chunked path, [T, H, Dv] and its log-sum-exp."""
    batch = case.batch
    batch.mha_return_lse = True
    batch.set_attn_attend_prefix_cache(False)
    out, lse = case.own()
    batch.set_attn_attend_prefix_cache(True)
    for chunk in range(batch.num_prefix_chunks):
        batch.set_prefix_chunk_idx(chunk)
        begins = batch.prefix_chunk_starts_cpu[chunk].tolist()
        lengths = batch.prefix_chunk_seq_lens_cpu[chunk].tolist()
        part, part_lse = case.call(*case.part(begins, lengths))
        assert part_lse.shape == (len(case.q), HEADS)
        assert part_lse.dtype is torch.float32
        assert part_lse.is_contiguous()
        out, lse = merge(out, lse, part, part_lse)
    return out, lse


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("padding", [0, 5])
def test_chunks_of_a_prefix_merge_to_a_dense_softmax(mode, padding):
    case = Case(mode, padding=padding)
    assert case.batch.num_prefix_chunks == 3  # some of them empty for some requests
    out, lse = in_chunks(case)
    assert case.error(out) < 1e-5
    assert not out[len(case.q) - padding :].any()
    assert lse.isfinite().all()


@pytest.mark.parametrize("padding", [0, 5])
def test_a_prompt_without_a_prefix_attends_to_its_own_tokens(padding):
    case = Case(prefix=(0, 0), new=(6, 19), padding=padding)
    assert case.error(case.own()) < 1e-5


def test_one_call_brings_all_tokens():
    case = Case()
    case.batch.mha_one_shot = True
    lengths = [len(k) for k in case.k]
    assert case.error(case.call(*case.part((0, 0, 0), lengths))) < 1e-5


def test_keys_that_sglang_does_not_name_are_refused():
    with pytest.raises(UnsupportedError, match="cached prefix"):
        Case().own()
    case = Case()
    case.backend._pass = (
        SimpleNamespace(forward_mode=attn_core.ForwardMode.TARGET_VERIFY, num_tokens=26),
        None,
    )
    with pytest.raises(UnsupportedError, match="verify"):
        case.own()


def test_sglang_unfolds_long_prefixes_for_the_name():
    Case()
    handler = AttentionBackendRegistry.get_handler("attn_core")
    assert handler is AttentionBackendRegistry.get_handler("fa3")


FAULTS = {
    "a causal chunk": lambda keys: keys._replace(causal=True),
    "a token of the neighbour": lambda keys: keys._replace(
        cu_seqlens=keys.cu_seqlens - keys.cu_seqlens.clamp(max=1)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_planted_faults(fault, monkeypatch):
    right = unfolded.keys_of

    def wrong(*args):
        keys = right(*args)
        return keys if keys.own else FAULTS[fault](keys)

    monkeypatch.setattr(unfolded, "keys_of", wrong)
    case = Case()
    assert case.error(in_chunks(case)[0]) > 1e-2
