"""What the Triton kernels keep of a layer and its cache: made once, never of another cache."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from attn_core.testing.inputs import mapped

pytest.importorskip("triton")

from attn_core.backends.triton.bindings import first_fit
from attn_core.backends.triton.kernel import Choice
from attn_core.backends.triton.portable.launch import PortableDecode
from triton_server import M, Server, make_backend, make_layer, same


@pytest.fixture
def bound(monkeypatch):
    """Collect the caches of which PortableDecode computes what it keeps."""
    caches, bind = [], PortableDecode.bind

    def counted(self, layer, cache, dtype):
        caches.append(cache)
        return bind(self, layer, cache, dtype)

    monkeypatch.setattr(PortableDecode, "bind", counted)
    return caches


def attend(backend, server, layer, cache):
    batch, rows = server.batch(M.DECODE)
    plan = backend.init_forward_metadata(batch)
    return backend.forward(server.q[rows], None, None, layer, cache, batch, plan, return_lse=True)


def written(server, layer):
    """Return the server's cache with the keys and values of its requests."""
    batch, rows = server.batch(M.DECODE)
    server.attend(make_backend(layer), batch, rows, layer)
    return server.cache(layer)


def test_it_is_computed_once_for_all_passes(bound):
    server, layer = Server((40, 1), (7, 1)), make_layer()
    cache, backend = server.cache(layer), make_backend(layer)
    for _ in range(3):
        attend(backend, server, layer, cache)
    assert len(bound) == 1


def test_a_replaced_pool_is_noticed(bound):
    """With other numbers at other strides."""
    server, layer = Server((40, 1), (7, 1)), make_layer()
    old, backend = written(server, layer), make_backend(layer)
    first = attend(backend, server, layer, old)

    def moved(t):
        pair = torch.zeros(t.shape[0], 2, *t.shape[1:], dtype=t.dtype, device=t.device)
        pair[:, 1] = t * 2
        return pair[:, 1]

    new = mapped(old, moved)
    bound.clear()
    got = attend(backend, server, layer, new)
    assert bound == [new]
    assert same(got, attend(make_backend(layer), server, layer, new))
    assert not same(got, first)
    assert same(attend(backend, server, layer, old), first), "and back again"


def test_a_pool_that_moved_is_noticed(bound):
    """The same tensors at another address, where launches that were bound do not read."""
    server, layer = Server((40, 1), (7, 1)), make_layer()
    layer = replace(layer, sinks=torch.zeros(layer.num_q_heads, device=server.q.device))
    cache, backend = written(server, layer), make_backend(layer)
    first = attend(backend, server, layer, cache)
    bound.clear()
    for tensor in (cache.k, cache.v, layer.sinks):
        old = tensor.clone()
        tensor.set_(tensor.clone())
        assert same(attend(backend, server, layer, cache), first)
        tensor.set_(old + 1)
        assert not same(attend(backend, server, layer, cache), first)
        tensor.set_(old)
        assert same(attend(backend, server, layer, cache), first)
    assert bound == [cache] * 9


def test_another_layer_of_the_same_number_is_noticed():
    server, layer = Server((40, 1), (7, 1)), make_layer()
    cache, backend = written(server, layer), make_backend(layer)
    attend(backend, server, layer, cache)
    other = replace(layer, scale=layer.scale * 2)
    want = attend(make_backend(layer), server, other, cache)
    assert same(attend(backend, server, other, cache), want)


def test_a_cache_that_is_dropped_is_not_kept_alive():
    server, layer = Server((40, 1)), make_layer()
    cache, backend = mapped(server.cache(layer), torch.Tensor.clone), make_backend(layer)
    store = weakref.ref(cache.k)
    attend(backend, server, layer, cache)
    del cache
    gc.collect()
    assert store() is None


def test_a_kernel_that_cannot_read_a_cache_is_passed_over():
    class Picky(PortableDecode):
        def bind(self, layer, cache, dtype):
            return None

    server, layer = Server((40, 1)), make_layer()
    choices = [Choice(Picky(), None), Choice(PortableDecode(), None)]
    choice, kept = first_fit(choices, layer, server.cache(layer), torch.float32)
    assert choice is choices[1]
    assert kept is not None
