"""intel_xpu over emulated vllm-xpu-kernels: the suite, the library's traps, what would fail."""

import dataclasses
import math

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BackendError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import RELATED
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.plan import plan
from attn_core.testing.replay import replayed
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_intel import tensors
from attn_intel.xpu import backend, library

XPU = {"vllm-xpu-kernels": "0.1.16.2"}
BMG = parse_device("xpu:bmg")
CPU = torch.device("cpu")


class TestBattlemage(BackendSuite):
    name = "intel_xpu"
    kinds = ("mha",)
    device = "xpu:bmg"
    on = "cpu"
    libraries = XPU
    passes = 60


@pytest.mark.long  # the same wrapper again
class TestPonteVecchio(TestBattlemage):
    device = "xpu:pvc"
    passes = 20


def spec():
    return load_plugins().get("intel_xpu")


def checks(*wanted):
    """List the first check whose name begins with each of `wanted`."""
    found = plan(spec(), BMG, XPU, kinds=("mha",), passes=10)
    asked = [next(p for p in found if p.row and p.check.id.startswith(w)) for w in wanted]
    assert asked
    return asked


# what the library is called with


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
    scales, among = tensors.Scales(CPU), torch.tensor([0.5, 2.0])
    for scale in (2.0, among[1], among[1:], torch.tensor(2.0)):
        tensor = scales.of(scale)
        assert tensor.shape == (1,)
        assert tensor.item() == 2.0
        assert tensor.untyped_storage().nbytes() == 4
    alone = torch.tensor([3.0])
    assert scales.of(alone).data_ptr() == alone.data_ptr(), "a change of it is seen"


# queries without keys, and what the suite asks of one page size alone


@pytest.mark.parametrize(("causal", "blind"), [(False, [0, 0, 1, 1, 0]), (True, [1, 0, 1, 1, 0])])
def test_queries_without_keys(causal, blind):
    cu_seqlens, lengths = torch.tensor([0, 2, 4, 5, 5]).int(), torch.tensor([1, 0, 7, 0]).int()
    found = tensors.without_keys(cu_seqlens, lengths, 5, causal=causal)
    assert found.tolist() == list(map(bool, blind))


LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=0.1
)


class Serving:
    """A backend over five pages of 64 tokens, and queries of 128 columns."""

    def __init__(self):
        config = BackendConfig(
            name="intel_xpu",
            row=next(r for r in spec().capabilities if 128 in r.head_dims),
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
    got = serving.attend(batch_of(EXTEND, [3, 1], rows=6))
    assert torch.equal(got[:4], right)


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


@pytest.mark.parametrize("page_size", [64, 192])
def test_replays_over_other_pages(page_size):
    row = next(r for r in spec().capabilities if 64 in r.head_dims)
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="bmg")
    replayed(bench, RELATED["mha"]["decode"], Point(dtype="bf16", page_size=page_size))


# mistakes


def patched(name, change):
    """Change what a function of the backend returns."""

    def mistake(monkeypatch):
        real = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, **k: change(real(*a, **k)))

    return mistake


def planned(**changes):
    """Change arguments of a pass, each by a function of the plan."""

    def mistake(monkeypatch):
        real = backend.IntelXPU._plan

        def plan(self, *args):
            made = real(self, *args)
            fresh = {name: change(made) for name, change in changes.items()}
            return dataclasses.replace(made, arguments=made.arguments | fresh)

        monkeypatch.setattr(backend.IntelXPU, "_plan", plan)

    return mistake


def called(change):
    """Change the arguments of every call of the library: change(arguments) is merged into them."""

    def mistake(monkeypatch):
        real = backend.load

        def load():
            attend = real()

            def call(q, k, v, **more):
                more |= {"q": q, "k": k, "v": v}
                return attend(**more | change(more))

            return call

        monkeypatch.setattr(backend, "load", load)

    return mistake


def returned(change):
    """Change the log-sum-exp that the library returns."""

    def mistake(monkeypatch):
        real = backend.IntelXPU._call

        def call(self, *args):
            result = real(self, *args)
            return (result[0], change(result[1])) if isinstance(result, tuple) else result

        monkeypatch.setattr(backend.IntelXPU, "_call", call)

    return mistake


def heads_first(more):
    return {n: more[n].transpose(-2, -3).reshape(more[n].shape) for n in ("k", "v")}


def cumulative(made):
    lengths = made.view.seq_lens.cumsum(0, dtype=torch.int32)
    return lengths.clamp_(max=made.view.max_seq_len)


def ignored_scales(monkeypatch):
    monkeypatch.setattr(tensors.Scales, "of", lambda self, scale: torch.ones(1))


def wider(change):
    return patched("window_of", lambda w: w if w[0] < 0 else (w[0] + change, w[1]))


def no_mask(monkeypatch):
    monkeypatch.setattr(backend, "without_keys", lambda *a, **k: None)


LSE = ("lse-whole", "lse-decode")
MISTAKES = {
    "a window of one token more": (wider(1), ("window-4-bf16", "window-decode-bf16")),
    "a window of one token less": (wider(-1), ("window-4-bf16", "window-decode-bf16")),
    "another layout": (called(heads_first), ("prefill-prefix-bf16", "decode-edges-bf16")),
    "no page offset": (
        planned(block_table=lambda made: made.table.new_zeros(made.table.shape)),
        ("prefill-prefix-bf16", "decode-edges-bf16"),
    ),
    "the head dim's scale": (
        called(lambda more: {"softmax_scale": more["q"].shape[-1] ** -0.5}),
        ("scale-large-bf16", "scale-small-bf16"),
    ),
    "cumulative lengths": (planned(seqused_k=cumulative), ("mixed-bf16", "decode-edges-bf16")),
    "no causal order": (called(lambda more: {"causal": False}), ("prefill-prefix-bf16",)),
    "LSE to base 2": (returned(lambda x: x / math.log(2)), LSE),
    "transposed LSE": (returned(lambda x: x.T.reshape(x.shape)), LSE),
    "scales ignored": (ignored_scales, ("fp8-e4m3-scaled-bf16",)),
    "sinks dropped": (called(lambda more: {"s_aux": None}), ("sinks-bf16",)),
    "splits in deterministic mode": (
        planned(num_splits_kv=lambda made: None),
        ("same-bits-decode",),
    ),
    "queries without keys": (no_mask, ("encoder-no-keys-bf16",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, wanted = MISTAKES[name]
    asked = checks(*wanted)
    for check in asked:
        run_check(check, spec(), CPU, arch="bmg")
    mistake(monkeypatch)
    for check in asked:
        with pytest.raises(CheckFailed):
            run_check(check, spec(), CPU, arch="bmg")
