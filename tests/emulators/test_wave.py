"""wave over emulated Wave: the suite, what is compiled, what would fail."""

import math
from dataclasses import replace

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_rocm.page_list import PageList
from attn_rocm.wave import backend, kernels

WAVE = {"wave-lang": "3.9.1"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_compiled():
    """Kernels of an emulation live as long as its modules."""
    for compiled in (kernels.decode_kernels, kernels.extend_kernel):
        compiled.cache_clear()


class TestWave(BackendSuite):
    name = "wave"
    device = "rocm:gfx942"
    on = "cpu"
    libraries = WAVE
    passes = 20
    reduced = True


@pytest.mark.long
class TestWhole(TestWave):
    """Every point of every case, as the evidence counts them."""

    passes = 60
    reduced = False


@pytest.mark.long  # the same kernels again
class TestMI350(TestWhole):
    device = "rocm:gfx950"
    passes = 20


def spec():
    return load_plugins().get("wave")


def checks(*wanted):
    """List the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("rocm:gfx942"), WAVE, passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert requested
    return requested


def run(planned):
    run_check(planned, spec(), CPU, arch="gfx942")


def test_layers_of_one_shape_share_their_kernels(vendor):
    shape = kernels.LayerShape(8, 2, 64, 64, torch.bfloat16, 0.125, 0.0)
    assert kernels.decode_kernels(shape) is kernels.decode_kernels(shape._replace())
    assert kernels.extend_kernel(shape, 128) is not kernels.extend_kernel(shape, 256)
    assert kernels.decode_kernels(shape._replace(scale=0.5)) is not kernels.decode_kernels(shape)


def test_causal_order_and_a_mask_exclude_each_other(vendor):
    from wave_lang.kernel.wave.templates import extend_attention as template

    shape = template.AttentionShape(
        num_query_heads=1, num_kv_heads=1, head_size=64, head_size_kv=64
    )
    same = ((1, 1, 64),) * 6
    with pytest.raises(AssertionError, match="both causal and custom mask"):
        template.get_extend_attention_kernel(shape, (), *same, is_causal=True, use_custom_mask=True)


def _no_offset_within_a_page(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        listed = real(cls, view, page_size, kernel_page, size, **more)
        listed.indices.div_(page_size, rounding_mode="floor")
        return listed

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _cumulative_lengths(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        total = view.seq_lens.cumsum(0, dtype=torch.int32).clamp_(max=view.max_seq_len)
        size = max(int(total.sum()), 1)
        return real(cls, replace(view, seq_lens=total), page_size, kernel_page, size, **more)

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _new_tokens_twice(monkeypatch):
    monkeypatch.setattr(backend, "replace", lambda view, **changes: view)


def _scale_of_the_head_dim(monkeypatch):
    real = backend.Wave._shape
    monkeypatch.setattr(
        backend.Wave,
        "_shape",
        lambda self, layer: real(self, layer)._replace(scale=layer.head_dim**-0.5),
    )


def _no_cap(monkeypatch):
    real = backend.Wave._shape
    monkeypatch.setattr(
        backend.Wave, "_shape", lambda self, layer: real(self, layer)._replace(logit_cap=0.0)
    )


def _sums_to_base_e(monkeypatch):
    real = backend.decode_kernels

    def decode(shape):
        parts, merge = real(shape)
        return parts, lambda outputs, sums, *rest: merge(outputs, sums * math.log(2) ** 2, *rest)

    monkeypatch.setattr(backend, "decode_kernels", decode)


def _another_layout(monkeypatch):
    real = backend.Wave._tokens

    def tokens(self, layer, cache):
        return tuple(x.transpose(-1, -2).reshape(x.shape) for x in real(self, layer, cache))

    monkeypatch.setattr(backend.Wave, "_tokens", tokens)


def _stale_lists(monkeypatch):
    monkeypatch.setattr(backend.Wave, "init_forward_metadata_replay_cuda_graph", lambda *a: None)


MISTAKES = [
    (_no_offset_within_a_page, ("mixed-bf16-page16", "decode-edges-bf16-page16")),
    (_cumulative_lengths, ("mixed-bf16-page16", "decode-edges-bf16-page16")),
    (_new_tokens_twice, ("prefill-prefix-bf16", "mixed-bf16")),
    (_scale_of_the_head_dim, ("scale-large-bf16", "scale-small-bf16")),
    (_no_cap, ("softcap-bf16", "softcap-decode-bf16")),
    (_sums_to_base_e, ("decode-long-bf16", "decode-edges-bf16")),
    (_another_layout, ("mixed-bf16", "decode-edges-bf16")),
    (_stale_lists, ("graph-decode",)),
]


@pytest.mark.parametrize(("mistake", "wanted"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_the_wrapper_is_seen(mistake, wanted, monkeypatch):
    requested = [p for w in wanted for p in checks(w)[:1]]
    for planned in requested:
        run(planned)
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run(planned)
