"""intel_xpu's calls of emulated vllm-xpu-kernels: what it passes, and what the library traps."""

import dataclasses
import itertools

import pytest
import torch
from attn_core import ScaleTensors
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BackendError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.kinds import Phase
from attn_core.testing.case_catalog import RELATED
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.replay import replayed
from attn_intel import tensors
from attn_intel.xpu import backend, library

CPU = torch.device("cpu")


def spec():
    return load_plugins().get("intel_xpu")


def batch_of(mode, query_lens, *, rows=None, **more):
    table = torch.zeros(len(query_lens), 2, dtype=torch.int32)
    lens = [n + 3 for n in query_lens]
    batch = ForwardBatch.build(
        mode, query_lens=query_lens, seq_lens=lens, page_table=table, page_size=64, **more
    )
    if rows is None:
        return batch
    padded = {"positions": torch.zeros(rows, dtype=torch.int64), "query_lens_host": None}
    return dataclasses.replace(batch, **padded)


EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
CHAIN = SpecInfo(topk=1, num_draft_tokens=4)


@pytest.mark.parametrize(
    ("batch", "longest", "deterministic"),
    [
        (batch_of(DECODE, [1, 1]), 1, 1),
        (batch_of(VERIFY, [4, 4], spec=CHAIN), 4, 5),
        (batch_of(EXTEND, [3, 3]), 3, 4),
        (batch_of(EXTEND, [3, 1]), 3, 3),
        (batch_of(EXTEND, [1, 1]), 1, 2),
        (batch_of(EXTEND, [1, 0]), 2, 2),  # a request without a token is not for decode
        (batch_of(EXTEND, [3, 1], rows=6), 4, 4),  # even by its rows, padded
        (batch_of(EXTEND, [3, 1], rows=5), 3, 3),
    ],
)
def test_the_kernel_of_a_pass(batch, longest, deterministic):
    """max_seqlen_q, by which the library takes a pass for one of even requests."""
    assert backend.longest_query(batch, deterministic=False) == longest
    assert backend.longest_query(batch, deterministic=True) == deterministic


def test_a_library_that_does_not_load_says_why(vendor, monkeypatch):
    from vllm_xpu_kernels import flash_attn_interface

    monkeypatch.setattr(flash_attn_interface, "FA2_AVAILABLE", False)
    monkeypatch.setattr(flash_attn_interface, "FA2_UNAVAILABLE_REASON", "libsycl.so.9: not found")
    with pytest.raises(BackendError, match=r"does not load: libsycl\.so\.9.*attn doctor"):
        library.load()


def test_a_version_with_other_parameters_is_named(vendor, monkeypatch):
    from vllm_xpu_kernels import flash_attn_interface

    monkeypatch.setattr(flash_attn_interface, "flash_attn_varlen_func", lambda q, k, v: None)
    with pytest.raises(BackendError, match=r"no parameter max_seqlen_q, .*\(it has q, k, v\)"):
        library.load()


def test_a_scale_lies_alone_in_its_memory():
    scales, among = ScaleTensors(CPU), torch.tensor([0.5, 2.0])
    for scale in (2.0, among[1], among[1:], torch.tensor(2.0)):
        tensor = scales.of(tensors.alone(scale))
        assert tensor.shape == (1,)
        assert tensor.item() == 2.0
        assert tensor.untyped_storage().nbytes() == 4
    alone = torch.tensor([3.0])
    assert scales.of(tensors.alone(alone)).data_ptr() == alone.data_ptr(), "a change of it is seen"


# queries without keys, and what the suite asks of one page size alone


@pytest.mark.parametrize(("causal", "blind"), [(False, [0, 0, 1, 1, 0]), (True, [1, 0, 1, 1, 0])])
def test_queries_without_keys(causal, blind):
    cu_seqlens, lengths = torch.tensor([0, 2, 4, 5, 5]).int(), torch.tensor([1, 0, 7, 0]).int()
    result = tensors.without_keys(cu_seqlens, lengths, 5, causal=causal)
    assert result.tolist() == list(map(bool, blind))


LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=0.1
)


class Serving:
    """A backend over five pages of 64 tokens, and queries of 128 columns."""

    def __init__(self, *, sliding_window=False):
        rows = [r for r in spec().capabilities if 128 in r.head_dims]
        config = BackendConfig(
            name="intel_xpu",
            row=next(r for r in rows if r.sliding_window == sliding_window),
            layers=(LAYER,),
            page_size=64,
            dtype="bf16",
            kv_cache_dtype="bf16",
            device=CPU,
            arch="bmg",
        )
        self.backend = create_backend(spec(), config)
        numbers = torch.Generator().manual_seed(0)
        self.q = torch.randn(6, 4, 128, generator=numbers).bfloat16()
        k, v = torch.randn(2, 5, 64, 2, 128, generator=numbers).bfloat16()
        self.cache = LayerCache(k=k, v=v)

    def attend(self, batch):
        metadata = self.backend.init_forward_metadata(batch)
        q = self.q[: batch.num_tokens]
        return self.backend.forward(q, None, None, LAYER, self.cache, batch, metadata)


def test_padding_that_makes_a_pass_look_even():
    serving = Serving()
    right = serving.attend(batch_of(EXTEND, [3, 1]))
    actual = serving.attend(batch_of(EXTEND, [3, 1], rows=6))
    assert torch.equal(actual[:4], right)


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_a_page_table_whose_rows_lie_apart(mode):
    serving, lens = Serving(), [1, 1] if mode is DECODE else [3, 2]
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    batch = ForwardBatch.build(
        mode, query_lens=lens, seq_lens=[100, 70], page_table=table, page_size=64
    )
    wide = torch.zeros(2, 7, dtype=torch.int32)
    wide[:, :2] = table
    view = dataclasses.replace(batch.views["full"], page_table=wide[:, :2])
    apart = dataclasses.replace(batch, views={"full": view})
    right = serving.attend(batch)
    assert torch.equal(serving.attend(apart), right)
    metadata = serving.backend.init_forward_metadata_capture_cuda_graph(apart)
    wide[:, :2] = 0
    serving.backend.init_forward_metadata_replay_cuda_graph(apart, metadata)
    assert not metadata["full"].table.any()


def combinations(row):
    """List the kernels that a row promises, as PREFILL and DECODE of the emulation have them."""
    buckets = {8 if g <= 8 else 16 for g in row.group_sizes} or {8, 16}
    cached = Phase.DECODE in row.phases
    for head in row.head_dims:
        lses = {False, row.lse}
        if cached:
            for local, sink in itertools.product({False, row.sliding_window}, {False, row.sinks}):
                yield "prefill", (head, True, not local, local, sink, False)
                yield from (("decode", (b, head, local, sink)) for b in buckets)
        if row.lse:
            yield "prefill", (head, True, True, False, False, True)
        if row.cross_attention:
            yield from (("prefill", (head, True, False, False, False, lse)) for lse in lses)
        if row.encoder:
            yield from (("prefill", (head, False, False, False, False, lse)) for lse in lses)


def test_every_declared_combination_has_a_kernel(vendor):
    from vllm_xpu_kernels import _leaf

    have = {"prefill": _leaf.PREFILL, "decode": _leaf.DECODE}
    for row in spec().capabilities:
        assert [x for x in combinations(row) if x[1] not in have[x[0]]] == []


def test_a_row_for_the_cache_refuses_to_do_without():
    serving = Serving(sliding_window=True)
    cu_seqlens, k = torch.tensor([0, 6], dtype=torch.int32), serving.q[:, :2]
    lengths = (cu_seqlens, cu_seqlens, 6, 6)
    with pytest.raises(UnsupportedError, match=r"without a cache.*LayerRequirements\(encoder=True"):
        serving.backend.forward_ragged(serving.q, k, k, LAYER, *lengths, causal=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_encoders_run_in_causal_order_or_refuse_it(vendor, head_dim):
    """At head dims 80 and 96 the wheel has kernels for full attention alone."""
    layer = dataclasses.replace(LAYER, head_dim=head_dim, v_head_dim=head_dim)
    row = next(r for r in spec().capabilities if r.phases == {Phase.ENCODE})
    that = Bench(spec=spec(), row=row, torch_device=CPU, arch="bmg").create(
        (layer,), dtype="bf16", page_size=64
    )
    q, k, v = (torch.randn(6, n, head_dim).bfloat16() for n in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    for causal in (False, True):
        arguments = (q, k, v, layer, cu_seqlens, cu_seqlens, 4, 4)
        if causal and head_dim in (80, 96):
            with pytest.raises(UnsupportedError, match=f"causal .* head dim {head_dim}, for which"):
                that.forward_ragged(*arguments, causal=True)
            continue
        out = that.forward_ragged(*arguments, causal=causal).double()
        for start, end in ((0, 2), (2, 6)):
            heads = (x[start:end].double().transpose(0, 1) for x in (q, k, v))
            one = torch.nn.functional.scaled_dot_product_attention(
                *heads, is_causal=causal, scale=layer.scale, enable_gqa=True
            )
            assert (out[start:end] - one.transpose(0, 1)).abs().max() < 0.02


def a_pass(row, **changes):
    """Return a backend of a row and the arguments of a prefill of three tokens after five."""
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=max(row.head_dims),
        v_head_dim=max(row.head_dims),
        scale=0.1,
        **changes,
    )
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="bmg")
    that = bench.create((layer,), dtype="bf16", page_size=64)
    batch = ForwardBatch.build(
        EXTEND,
        query_lens=[3],
        seq_lens=[8],
        page_table=torch.ones(1, 1, dtype=torch.int32),
        page_size=64,
    )
    q, k, v = (torch.randn(*n, layer.head_dim).bfloat16() for n in ((3, 4), *2 * ((2, 64, 2),)))
    cache = LayerCache(k=k, v=v)
    return that, (q, None, None, layer, cache, batch, that.init_forward_metadata(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_that_change_count_as_they_are(vendor, dtype):
    """The kernels read them in the dtype of q: a copy made once would be of weights before."""
    row = next(r for r in spec().capabilities if r.sinks)
    sinks = torch.zeros(4, dtype=dtype)
    that, arguments = a_pass(row, sinks=sinks)
    before = that.forward(*arguments)
    sinks.fill_(80)  # as weights that are loaded into the model afterwards
    assert before.abs().max() > 0.01
    assert that.forward(*arguments).abs().max() < 1e-6


def test_an_encoder_over_the_cache_is_refused_where_no_kernel_is(vendor):
    """With a head dim of 256 the kernels over pages are of causal order alone."""
    row = next(r for r in spec().capabilities if r.encoder and r.head_dims == {256})
    that, arguments = a_pass(row, is_causal=False)
    with pytest.raises(UnsupportedError, match="attends to a cache without causal order"):
        that.forward(*arguments)


@pytest.mark.parametrize("page_size", [64, 192])
def test_replays_over_other_pages(page_size):
    row = next(r for r in spec().capabilities if 64 in r.head_dims)
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="bmg")
    replayed(bench, RELATED["mha"]["decode"], Point(dtype="bf16", page_size=page_size))
