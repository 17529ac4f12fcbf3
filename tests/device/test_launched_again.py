"""Layers of sparse MLA and linear attention on a GPU, launched again: the bits of first launches.

Run: `pytest tests/device/test_launched_again.py`.
"""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from triton import knobs

from benchmarks.layer_calls import linear_calls
from benchmarks.linear_cases import LinearCase
from benchmarks.sparse_cases import SparseCase, build

CASES = {
    "decode": SparseCase(phase="decode", batch=5, new=1, length=4096),
    "short": SparseCase(phase="decode", batch=5, new=1, length=1024),
    "extend": SparseCase(phase="prefill", batch=3, new=4, length=4096),
    "prompt": SparseCase(phase="prefill", batch=2, new=100, length=4096),
}


def shifted(x, elements=1):
    """Return a copy that begins so many elements behind an aligned address."""
    flat = torch.zeros(x.numel() + elements, dtype=x.dtype, device=x.device)
    return flat[elements:].view(x.shape).copy_(x)


def created(x, store):
    """Return a new backend over a case's pass, which has launched nothing yet."""
    spec = load_plugins().get("triton")
    row = next(
        r
        for r in spec.capabilities
        if r.kind == "dsa" and r.device == "cuda" and store in r.kv_dtypes
    )
    config = BackendConfig(
        name="triton", row=row, layers=(x.layer,), page_size=64, dtype="bf16",
        kv_cache_dtype=store, device=x.q.device,
    )  # fmt: skip
    return create_backend(spec, config)


def passed(backend, x, cache, plan=None, **changes):
    """Return the selection of a pass, its output and its LSE."""
    x = replace(x, **changes)
    plan = backend.init_forward_metadata(x.batch) if plan is None else plan
    requested = (x.layer, cache, x.batch, plan)
    chosen = backend.index_topk(x.q_index, x.weights, *requested)
    return chosen, *backend.forward(
        x.q, None, None, *requested, return_lse=True, topk_indices=chosen
    )


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("name", CASES)
def test_a_chain_has_the_bits_of_its_first_launches(name, store):
    x = build(CASES[name], torch.device("cuda"))
    cache = x.caches[store]

    def first(**changes):
        return passed(created(x, store), x, replace(cache), **changes)

    backend, want = created(x, store), first()
    assert same(passed(backend, x, cache), want)
    forms = [
        {}, {"q": shifted(x.q)}, {"q": shifted(x.q, 8)}, {"weights": shifted(x.weights)},
        {"q_index": shifted(x.q_index)}, {"q_index": x.q_index.bfloat16()}, {},
    ]  # fmt: skip
    for changes in forms:
        right = first(**changes)
        for _ in range(2):
            assert same(passed(backend, x, cache, **changes), right), [*changes]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = passed(backend, x, cache)
    here = passed(backend, x, cache)
    torch.cuda.synchronize()
    assert same(aside, want)
    assert same(here, want)


@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3"])
def test_a_graph_of_a_chain(store):
    """What was launched before is captured, and reads the lengths of each replay."""
    x = build(CASES["decode"], torch.device("cuda"))
    backend, cache = created(x, store), x.caches[store]
    plan = backend.init_forward_metadata_capture_cuda_graph(x.batch)
    for _ in range(2):
        passed(backend, x, cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = passed(backend, x, cache, plan)
    lengths = x.view.seq_lens
    for length in (4096, 3000, 100):
        lengths.fill_(length)
        graph.replay()
        assert same(actual, passed(created(x, store), x, replace(cache)))


@pytest.mark.parametrize("op", ["decode", "verify", "prefill"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_linear_attention_has_the_bits_of_its_first_launch(op, kind):
    """Verification leaves the states; the others start from those that a first call started from.

    A hook makes a launcher take Triton's public way.
    """
    heads = (16, 32) if kind == "gdn" else (32, 32)
    case = LinearCase(op=op, batch=5, tokens=1 if op == "decode" else 4, kind=kind, heads=heads)
    outputs = []
    for hooked in (False, True):
        [(_, call)] = linear_calls(case, torch.device("cuda"))
        call()
        hooks = knobs.runtime.launch_enter_hook
        ignored = lambda metadata: None  # noqa: E731  # removed by identity
        if hooked:
            hooks.add(ignored)
        try:
            outputs.append([call(), call()])
        finally:
            if hooked:
                hooks.remove(ignored)
    assert same(*outputs)
