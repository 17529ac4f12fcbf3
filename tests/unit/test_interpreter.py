"""Triton's interpreter computes what a GPU computes; without the repairs it does not."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on the GPU here", allow_module_level=True)

import interpreter
import triton
import triton.language as tl

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
N = 64


@triton.jit
def apply(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        c = a + b
    if OP == "multiply":
        c = a * b
    if OP == "divide":
        c = a / b
    if OP == "negate":
        c = -a
    if OP == "less":
        c = a < b
    if OP == "maximum":
        c = tl.maximum(a, b)
    if OP == "minimum":
        c = tl.minimum(a, b)
    if OP == "clamp":
        c = tl.clamp(a, -1.0, 1.0)
    if OP == "fma":
        c = tl.fma(a, b, a)
    if OP == "cast":
        c = a
    if OP == "masked":
        c = tl.load(x + i, mask=i < 3)
    if OP == "stray":
        c = tl.load(x + i + 1)
    if OP == "stray-store":
        c = a
        out += 1
    if OP == "guarded":
        c = tl.load(x + i + 1, mask=i < N - 1, other=0.0)
    tl.store(out + i, c.to(out.dtype.element_ty))


def run(op, x, y=None, into=None):
    out = torch.zeros(N, dtype=into or x.dtype)
    apply[(1,)](x, x if y is None else y, out, op, N)
    return out


@triton.jit
def multiply(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def matrices(dtype):
    x, y = (draw(n).repeat(N, 1) + n for n in (0, 1))
    x, y = (t.to(dtype) for t in (x, y))
    out = torch.zeros(N, N)
    multiply[(1,)](x, y, out, N)
    return out, x.float() @ y.float()


def draw(seed=0):
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def floats():
    """Halves and more of a last place, the ends of every range, and what is no number."""
    ends = [447.0, 460.0, 480.0, 500.0, -1e3, 57344.0, 6e4, -1e6, 2**-9, 2**-10, 1.5 * 2**-9, 0.0]
    ends += [2**-16, 2**-17, 1.0625, 1.1875, torch.nan, torch.inf, -torch.inf, 1 + 2**-8]
    return torch.cat([torch.tensor(ends), draw()[len(ends) :]])


def same(a, b):
    return torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


def computed(op, want, dtype=torch.bfloat16, **more):
    def right():
        x, y = draw().to(dtype), draw(1).to(dtype)
        return same(run(op, x, y, **more), want(x.float(), y.float()).to(more.get("into", dtype)))

    return right


def rounded(into, x=floats):
    def right():
        got, want = run("cast", x(), into=into), x()
        if into.itemsize == 1:
            want = want.clamp(-torch.finfo(into).max, torch.finfo(into).max)
        return same(got, want.to(into))

    return right


def widened(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    return lambda: all(same(run("cast", x, into=torch.float32), x) for x in every.split(N))


def product(dtype):
    return lambda: torch.allclose(*matrices(dtype), rtol=1e-5, atol=1e-4)


def product_of_nan(dtype):
    out = torch.zeros(N, N)
    x = torch.eye(N).to(dtype)
    y = torch.full((N, N), torch.nan).to(dtype)
    multiply[(1,)](x, y, out, N)
    return bool(out.isnan().all())


def refused(op):
    with pytest.raises(triton.runtime.errors.InterpreterError, match="StrayAddressError"):
        run(op, draw())
    return True


def holds(name):
    try:
        return FAULTS[name][0]()
    except (triton.runtime.errors.InterpreterError, pytest.fail.Exception):
        return False


NAN = torch.full((N,), torch.nan)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What is computed → (a check of it, the version of Triton that needs no repair any more).
FAULTS = {
    "bf16 dot": (product(torch.bfloat16), None),
    "e4m3 dot": (lambda: product_of_nan(E4M3), None),
    "bf16 add": (computed("add", torch.add), None),
    "bf16 multiply": (computed("multiply", torch.mul), None),
    "bf16 divide": (computed("divide", torch.div), None),
    "bf16 negate": (computed("negate", lambda x, y: -x), None),
    "bf16 less": (computed("less", torch.lt, into=torch.float32), None),
    "bf16 fma": (computed("fma", lambda x, y: x * y + x), None),
    "int to bf16": (rounded(torch.bfloat16, x=lambda: torch.arange(N) * 7), None),
    "fp32 to bf16": (rounded(torch.bfloat16), None),
    "fp32 to e4m3": (rounded(E4M3), None),
    "fp32 to e5m2": (rounded(E5M2), None),
    "e4m3 to fp32": (widened(E4M3), None),
    "e5m2 to fp32": (widened(E5M2), None),
    "maximum of a NaN": (lambda: same(run("maximum", NAN, draw()), draw()), (3, 9)),
    "minimum of a NaN": (lambda: same(run("minimum", draw(), NAN), draw()), (3, 9)),
    "clamped NaN": (lambda: bool((run("clamp", NAN) == -1).all()), (3, 9)),
    "masked lanes": (lambda: bool(run("masked", draw())[3:].isnan().all()), None),
    "stray load": (lambda: refused("stray"), None),
    "stray store": (lambda: refused("stray-store"), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_computes_what_a_gpu_does(name):
    assert holds(name)


@pytest.mark.parametrize("name", [x for x, (_, end) in FAULTS.items() if not end or end > VERSION])
def test_the_repair_is_needed(name):
    with interpreter.as_shipped():
        assert not holds(name)


def test_what_was_right_stays():
    x, y = draw(), draw(1)
    for op, want in {
        "add": x + y,
        "multiply": x * y,
        "maximum": x.maximum(y),
        "negate": -x,
    }.items():
        assert torch.equal(run(op, x, y), want)
    assert torch.equal(run("guarded", x), torch.cat([x[1:], torch.zeros(1)]))
    assert product(torch.float16)()
    assert product(torch.float32)()


def test_installing_twice_is_installing_once():
    before = interpreter.interpreter._convert_float
    interpreter.install()
    assert interpreter.interpreter._convert_float is before
