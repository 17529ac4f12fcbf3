"""fa3 over the latent cache: the suite, what the library is handed, and mistakes that are seen."""

import functools

import pytest
import torch
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed

SGL, UPSTREAM = {"sglang-kernel": "0.4.5"}, {"flash-attn-3": "3.0.0b1"}


class TestFA3MLA(BackendSuite):
    name = "fa3"
    kinds = ("mla",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = SGL
    passes = 60


@pytest.mark.usefixtures("upstream")
@pytest.mark.long  # the same wrapper again
class TestUpstreamsBuild(BackendSuite):
    name = "fa3"
    kinds = ("mla",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = UPSTREAM
    passes = 30
    reduced = True


@pytest.fixture
def upstream(vendor, monkeypatch):
    monkeypatch.syspath_prepend(str(vendor.parent / "flash_attn_3_installed"))


def layer_of(**more):
    kwargs = {"layer_id": 0, "num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576}
    kwargs |= {"v_head_dim": 512, "scale": 192**-0.5}
    return AttentionLayer(**kwargs | more)


def decode(layer):
    """Decode two requests with one layer; return what came out, the queries and the latents."""
    spec = load_plugins().get("fa3")
    row = next(r for r in spec.capabilities if r.kind == "mla")
    config = BackendConfig(
        name="fa3",
        row=row,
        layers=(layer,),
        page_size=16,
        dtype="bf16",
        kv_cache_dtype="bf16",
        device=torch.device("cpu"),
        arch="sm90",
    )
    table, lens = pad_page_table([[3, 1], [2]]), (20, 9)
    pool = KVPool([layer], num_pages=4, page_size=16, kv_cache_dtype="bf16", kind="mla")
    rng = torch.Generator().manual_seed(1)
    latents = torch.randn(sum(lens), 1, 576, generator=rng).bfloat16()
    kwargs = {"seq_lens": lens, "page_table": table, "page_size": 16}
    new = ForwardBatch.build(ForwardMode.EXTEND, query_lens=lens, **kwargs)
    write_kv(pool.layer(0), latents, None, new.views["full"].out_cache_loc)
    batch = ForwardBatch.build(ForwardMode.DECODE, query_lens=[1, 1], **kwargs)
    backend = create_backend(spec, config)
    q = torch.randn(2, layer.num_q_heads, 576, generator=rng).bfloat16()
    metadata = backend.init_forward_metadata(batch)
    out = backend.forward(q, None, None, layer, pool.layer(0), batch, metadata)
    return out, q, latents.split(lens), pool.layer(0)


def test_nothing_is_copied_on_the_way_to_the_library(monkeypatch):
    from sgl_kernel import flash_attn

    seen, real = [], flash_attn.flash_attn_with_kvcache

    @functools.wraps(real)
    def watched(*tensors, **named):
        seen.append((*tensors, named["qv"]))
        return real(*tensors, **named)

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", watched)
    _, q, _, cache = decode(layer_of())
    [(rope, k, v, qv)] = seen
    assert (rope.shape[-1], k.shape[-1], v.shape[-1], qv.shape[-1]) == (64, 64, 512, 512)
    assert rope.untyped_storage().data_ptr() == qv.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()
    assert rope.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


def test_a_soft_cap_of_the_joint_logits():
    out, q, latents, _ = decode(layer_of(logit_cap=2.0))
    for b, latent in enumerate(latents):
        keys = latent[:, 0].float()
        scores = torch.tanh(q[b].float() @ keys.T * 192**-0.5 / 2.0) * 2.0
        right = scores.softmax(-1) @ keys[:, :512]
        assert torch.allclose(out[b].float(), right, atol=2e-2)


def _parts_swapped(monkeypatch):
    from attn_nvidia.fa3 import mla as fa3_mla

    real = fa3_mla.FA3MLA._run

    def swapped(self, call, arguments, q, *rest):
        return real(self, call, arguments, torch.cat([q[..., 64:], q[..., :64]], -1), *rest)

    monkeypatch.setattr(fa3_mla.FA3MLA, "_run", swapped)


@pytest.mark.parametrize("mistake", [_parts_swapped])
def test_a_mistake_in_the_wrapper_is_seen(mistake, monkeypatch):
    spec = load_plugins().get("fa3")
    result = plan(spec, parse_device("cuda:sm90"), SGL, kinds=("mla",), passes=10, reduced=True)
    requested = [p for p in result if p.row and p.check.id.startswith(("mla-decode", "mla-verify"))]
    assert len(requested) > 4
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run_check(planned, spec, torch.device("cpu"), arch="sm90")
