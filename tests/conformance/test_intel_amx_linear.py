"""intel_amx's linear layers of few rows: torch's numbers up to rounding, and what torch keeps."""

import copy
import ctypes
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from amx_kernels import at_level, compiled, level_of_this_cpu
from attn_core import BackendConfig
from attn_core.plugins.registry import load_plugins
from attn_intel.cpu import linear
from attn_intel.cpu.backend import IntelAMX
from attn_intel.cpu.library import LEVELS, load
from attn_intel.cpu.linear import ROWS, LinearOfFewRows
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=[*LEVELS, "emulated tiles"])
def level(request, monkeypatch):
    """Run at a level, in plain C where this CPU lacks it; count the calls of the kernels."""
    path, name = None, request.param
    if name == "emulated tiles" or LEVELS.index(name) > LEVELS.index(level_of_this_cpu()):
        path = request.getfixturevalue("over_emulated_tiles")
    name = name if name in LEVELS else "amx_bf16"
    with at_level(monkeypatch, name, path) as kernels:
        calls = []
        multiply = kernels.linear
        monkeypatch.setattr(kernels, "linear", lambda x: calls.append(1) or multiply(x))
        monkeypatch.setattr(linear, "load", lambda: kernels)
        yield name, calls


def layer(inputs, outputs, *, bias=False, dtype=BF16):
    """Return a layer whose weights and bias end where NaNs begin."""
    made = LinearOfFewRows(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    made.weight.data = beside_nan(torch.randn(outputs, inputs), dtype)
    if bias:
        made.bias.data = beside_nan(torch.randn(outputs), dtype)
    return made


def beside_nan(x, dtype=BF16):
    """Return x in the dtype, dense, in memory that is NaN before and after it."""
    memory = torch.full((x.numel() + 4096,), torch.nan, dtype=dtype)
    memory[2048 : 2048 + x.numel()] = x.flatten().to(dtype)
    return memory[2048 : 2048 + x.numel()].view(x.shape)


def check(found, made, x):
    """Compare with float64: the error of a sum in float32, and of one rounding to the dtype."""
    wanted = F.linear(x.double(), made.weight.double())
    size = F.linear(x.double().abs(), made.weight.double().abs())
    if made.bias is not None:
        wanted, size = wanted + made.bias.double(), size + made.bias.double().abs()
    assert found.dtype == x.dtype
    assert found.shape == wanted.shape
    rounding = torch.finfo(x.dtype).eps / 2
    assert ((found.double() - wanted).abs() <= rounding * wanted.abs() + 2**-18 * size).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (96, 31), (576, 100), (64, 224)])
def test_it_multiplies(level, rows, inputs, outputs, bias):
    made, x = layer(inputs, outputs, bias=bias), beside_nan(torch.randn(rows, inputs))
    with torch.inference_mode():
        check(made(x), made, x)
    assert level[1] == [1]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_a_level_takes_so_many_rows_and_torch_the_rest(level, rows, dtype):
    name, calls = level
    made, x = layer(96, 70, bias=True, dtype=dtype), beside_nan(torch.randn(rows, 96), dtype)
    with torch.inference_mode():
        check(made(x), made, x)
    assert len(calls) == (rows <= ROWS.get((name, dtype), 0))


def test_prompts_where_torch_has_no_products_of_bfloat16(level):
    """Rows go over all weights in parts that stay in the cache: here 32 and 3."""
    name, calls = level
    made, x = layer(2048, 37), beside_nan(torch.randn(35, 2048))
    with torch.inference_mode():
        check(made(x), made, x)
    assert len(calls) == (name == "avx2")


@pytest.mark.parametrize("shape", [(96,), (1, 2, 96), (0, 96), (3, 0, 96)])
def test_any_dims(level, shape):
    made, x = layer(96, 40, bias=True), torch.randn(shape).to(BF16)
    with torch.inference_mode():
        check(made(x), made, x)


@pytest.mark.parametrize("rows", [1, 5])
def test_bits_depend_on_no_number_of_threads(level, rows):
    made, x, found = layer(576, 300), torch.randn(rows, 576).to(BF16), []
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for threads in (1, 2, 5, 16):
                torch.set_num_threads(threads)
                found.append(made(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], y) for y in found[1:])
    assert len(level[1]) == 4


def test_fewer_threads_than_were_asked_for(level, monkeypatch):
    """OpenMP gives fewer where it is told to, and one inside of a parallel region."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    alone = ctypes.CFUNCTYPE(None, run, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
        lambda work, data, threads, flags: work(data)
    )
    address = ctypes.cast(alone, ctypes.c_void_p).value
    monkeypatch.setattr(linear.load(), "parallel", address)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    made, x = layer(96, 300), torch.randn(2, 96).to(BF16)
    with torch.inference_mode():
        check(made(x), made, x)
    assert level[1]


def test_what_is_left_to_torch(level):
    made, plain = layer(64, 40), torch.randn(4, 64).to(BF16)
    odd = layer(48, 40)
    with torch.inference_mode():
        for x in (plain.T.contiguous().T, torch.randn(2, 4, 64).to(BF16)[:, 1]):
            check(made(x), made, x)
        check(odd(x := torch.randn(4, 48).to(BF16)), odd, x)  # inputs that 32 does not divide
        assert layer(64, 40).half()(plain.half()).dtype == torch.float16
        with pytest.raises(RuntimeError):
            made(plain[:, :32])
        with torch.autocast("cpu", torch.float16):
            assert made(plain).dtype == torch.float16
    made.requires_grad_(True)
    with torch.enable_grad():
        made(plain).sum().backward()
    assert made.weight.grad is not None
    assert not level[1]


class Wrapped(torch.Tensor):
    """A weight without memory of its own, as quantised ones are."""

    @staticmethod
    def __new__(cls, held):
        made = cls._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = [x.held if isinstance(x, Wrapped) else x for x in args]
        return func(*own, **(kwargs or {}))


def test_weights_without_memory_and_layers_without_outputs_are_left_to_torch(level):
    made, x = layer(64, 40), torch.randn(2, 64).to(BF16)
    held = made.weight.detach()
    del made.weight
    made.weight = Wrapped(held)
    with torch.inference_mode():
        assert torch.equal(made(x), F.linear(x, held))
        assert LinearOfFewRows(64, 0, bias=False, dtype=BF16)(x).shape == (2, 0)
    assert not level[1]


def test_pruned_traced_and_mapped_layers_multiply_as_torch_does(level):
    made, x = layer(64, 40), torch.randn(2, 64).to(BF16)
    with torch.no_grad():
        traced = torch.jit.trace(layer(64, 40), (x,))
        assert traced(x).isfinite().all()
        check(torch.vmap(made)(x), made, x)
        torch.nn.utils.prune.identity(made, "weight")
        check(made(x), made, x)


def test_a_compiled_model_multiplies_as_torch_does(level):
    made, x = layer(64, 40), torch.randn(2, 64).to(BF16)
    with torch.inference_mode():
        whole = torch.compile(made, backend="eager", fullgraph=True)
        check(whole(x), made, x)
    assert not level[1]


def test_it_is_saved_copied_and_pickled_as_a_plain_one(level):
    made, x = layer(64, 40, bias=True), torch.randn(2, 64).to(BF16)
    assert made.state_dict().keys() == nn.Linear(64, 40).state_dict().keys()
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(again) is LinearOfFewRows
        with torch.inference_mode():
            assert torch.equal(again(x), made(x))


@pytest.mark.parametrize(
    ("name", "dtype", "gains"),
    [
        *((x, "bf16", True) for x in LEVELS),
        *((x, "fp32", x in ("avx2", "avx512")) for x in LEVELS),
        *((x, "fp16", False) for x in LEVELS),
    ],
)
def test_the_backend_has_it_where_it_gains(monkeypatch, name, dtype, gains):
    compiled()
    monkeypatch.setattr(load(), "level", LEVELS.index(name))
    row = next(r for r in load_plugins().get("intel_amx").capabilities if r.kind == "mha")
    config = BackendConfig(
        name="intel_amx", row=row, layers=(), page_size=1, dtype=dtype, kv_cache_dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert IntelAMX(config).linear_class() is (LinearOfFewRows if gains else None)
