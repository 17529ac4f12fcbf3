"""What a caller sets in torch, a default device or inference mode, changes no pass."""

import contextlib

import pytest
import torch
from attn_core import (
    AttentionLayer,
    CacheView,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    PageAllocator,
    Requirements,
    load_plugins,
    pad_page_table,
    parse_device,
    select,
)

PAGE, HEADS, DIM = 16, 2, 16


@contextlib.contextmanager
def default_device(name):
    """Set a default device; "meta" stands for a GPU: no value can be read there."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Server:
    """Three requests of one layer with a window and one without."""

    def __init__(self, backend):
        registry = load_plugins()
        heads = {"num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "v_head_dim": DIM}
        self.layers = [
            AttentionLayer(layer_id=0, scale=0.25, **heads),
            AttentionLayer(layer_id=1, scale=0.25, sliding_window=5, view="window", **heads),
        ]
        needs = Requirements(
            layers=tuple(map(LayerRequirements.of, self.layers)), dtype="fp32", page_size=PAGE
        )
        named = Overrides(attention_backend=backend)
        chosen = select(needs, parse_device("cpu"), registry, {}, named)
        self.pool = KVPool(self.layers, num_pages=20, page_size=PAGE, kv_cache_dtype="fp32")
        self.dispatcher = HybridDispatcher.from_selection(chosen, registry, self.layers, self.pool)
        self.pages, self.lengths = PageAllocator(20, PAGE), [0, 0, 0]
        for i in range(3):  # pages that do not follow each other are gathered
            self.pages.grow(i, 1)
        self.rng = torch.Generator("cpu").manual_seed(0)

    def run(self, mode, new):
        """Return the outputs of both layers."""
        self.lengths = [a + b for a, b in zip(self.lengths, new, strict=True)]
        rows = [self.pages.grow(i, n) for i, n in enumerate(self.lengths)]
        lengths = {"page_size": PAGE, "seq_lens": self.lengths}
        view = CacheView.build(page_table=pad_page_table(rows), new_lens=new, **lengths)
        batch = ForwardBatch.build(
            mode,
            query_lens=new,
            page_table=pad_page_table(rows),
            views={"window": view},
            **lengths,
        )
        plan = self.dispatcher.init_forward_metadata(batch)
        return [
            self.dispatcher.forward(*self.drawn(sum(new)), layer, batch, plan)
            for layer in self.layers
        ]

    def drawn(self, tokens):
        return [
            torch.randn(tokens, HEADS, DIM, generator=self.rng, device="cpu", dtype=torch.float32)
            for _ in range(3)
        ]


def passes(backend, *contexts):
    """Run a prompt of three requests and decode steps, each pass in its own context."""
    server, outputs = Server(backend), []
    for i, context in enumerate(contexts):
        mode, new = (ForwardMode.DECODE, [1] * 3) if i else (ForwardMode.EXTEND, [17, 3, 40])
        with context():
            outputs += server.run(mode, new)
    return outputs


@pytest.mark.parametrize("backend", ["torch_native", "flex_attention"])
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_pass_in_inference_mode_leaves_the_next_one_free(backend, first):
    then = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    expected = passes(backend, *[torch.no_grad] * 5)
    for a, b in zip(expected, passes(backend, first, first, then, first, then), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["torch_native", "flex_attention"])
def test_batches_are_built_on_the_host_whatever_the_default_device_is(backend):
    expected = passes(backend, *[contextlib.nullcontext] * 3)
    with default_device("meta"):
        actual = passes(backend, *[contextlib.nullcontext] * 3)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)


def test_a_default_dtype_changes_no_output():
    expected = passes("torch_native", *[contextlib.nullcontext] * 3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = passes("torch_native", *[contextlib.nullcontext] * 3)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
