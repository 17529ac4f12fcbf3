"""What a caller sets in torch, a default device or inference mode, changes no pass."""

import ast
import contextlib
import pathlib

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    LinearLayer,
    Overrides,
    PageAllocator,
    Requirements,
    ScaleTensors,
    StatePool,
    create_backend,
    load_plugins,
    pad_page_table,
    parse_device,
    select,
)

PAGE, HEADS, DIM = 16, 2, 16
PACKAGES = pathlib.Path(__file__).parents[2] / "packages"
EMPTY = [  # tensors of no numbers
    "ragged.py: torch.empty(0, device='cpu')",
    "vision.py: torch.empty(0)",  # asks for the default dtype
]


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


@contextlib.contextmanager
def default_dtype(dtype):
    """Set a default dtype."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_default_dtype_changes_no_output():
    expected = passes("torch_native", *[contextlib.nullcontext] * 3)
    with default_dtype(torch.bfloat16):
        actual = passes("torch_native", *[contextlib.nullcontext] * 3)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_changes_no_state_of_linear_layers(dtype):
    torch.manual_seed(0)
    heads = {"num_k_heads": 2, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 16}
    layer = LinearLayer(layer_id=0, kind="gdn", qk_norm=1e-6, **heads)
    row = next(r for r in load_plugins().get("torch_native", "linear").capabilities)
    config = BackendConfig(
        name="torch_native", row=row, layers=(), linear_layers=(layer,), page_size=1,
        dtype="fp32", kv_cache_dtype="fp32", device=torch.device("cpu"),
    )  # fmt: skip
    backend = create_backend(load_plugins().get("torch_native", "linear"), config, "linear")
    q, k, v = (torch.randn(70, 2, 16) for _ in range(3))
    g, beta = -torch.rand(70, 2), torch.rand(70, 2)

    def run():
        pool = StatePool([layer], num_slots=1)
        pool.states.state.fill_(0.3)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            cu_seqlens_q=torch.tensor([0, 70], dtype=torch.int32),
            positions=torch.arange(70), max_q_len=70, query_lens_host=(70,),
            state_slots=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        plan = backend.init_forward_metadata(batch)
        out = backend.extend(q, k, v, g, beta, layer, pool.layer(0), batch, plan)
        return out, pool.states.state

    expected = run()
    with default_dtype(dtype):
        actual = run()
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)


def test_scales_are_float32_whatever_the_default_dtype_is():
    with default_dtype(torch.bfloat16):
        scale = ScaleTensors(torch.device("cpu")).of(0.3)
    assert torch.equal(scale, torch.tensor([0.3], dtype=torch.float32))


def test_no_tensor_is_made_in_the_default_dtype():
    """Its dtype would be the caller's, and kernels read bytes."""
    makers = {
        f"torch.{name}" for name in ("zeros", "empty", "ones", "full", "eye", "rand", "randn")
    }
    found = []
    for path in PACKAGES.rglob("src/**/*.py"):
        if {"testing", "measure"} & set(path.parts):  # which draw in the default dtype and judge
            continue
        calls = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        for call in calls:
            named = {word.arg for word in call.keywords}  # None: **options
            if ast.unparse(call.func) in makers and not named & {"dtype", None}:
                found.append(f"{path.name}: {ast.unparse(call)}")
    assert sorted(found) == EMPTY
