"""Mend what Triton's CPU interpreter gets silently wrong, and stop it at stray addresses."""

import contextlib
import functools

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

# Of Triton 3.6 to 3.9. bf16 and float8 are kept as raw bits, on which every operation counts.
RAW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
FLOATS = RAW | {tl.float16: torch.float16, tl.float32: torch.float32}
BITS = {1: np.uint8, 2: np.int16, 4: np.int32}


class StrayAddressError(Exception):
    """A kernel reads or writes outside of the tensors that it was given."""


def install():
    """Replace the faulty parts of the interpreter; what is there already stays."""
    for owner, name, make in _PARTS:
        original = getattr(owner, name, None)  # some versions lack an operation
        if original is not None and not hasattr(original, "mends"):
            part = make(original)
            part.mends = original
            setattr(owner, name, part)


@contextlib.contextmanager
def as_shipped():
    """Take the repairs away for a while."""
    for owner, name, _ in _PARTS:
        part = getattr(owner, name, None)
        if hasattr(part, "mends"):
            setattr(owner, name, part.mends)
    try:
        yield
    finally:
        install()


def _converted(original):
    """Round to the nearest even and saturate in float8, as the hardware does; keep every NaN."""

    def convert(x, src, dst, mode):
        rtne = mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if src not in FLOATS or dst not in FLOATS or not rtne:
            return original(x, src, dst, mode)
        x = np.ascontiguousarray(x)
        bits = torch.from_numpy(x.view(BITS[x.itemsize]).reshape(-1).copy())
        value = bits.view(FLOATS[src]).float()
        into = FLOATS[dst]
        if into.itemsize == 1:
            top = torch.finfo(into).max
            value = value.clamp(-top, top)
        width = BITS[into.itemsize]
        got = value.to(into).view(torch.from_numpy(np.empty(0, width)).dtype).numpy()
        return got.view(f"u{into.itemsize}").reshape(x.shape)

    return convert


def _to(handle, dtype):
    data = interpreter._convert_float(handle.data, handle.dtype.scalar, dtype, None)
    return TensorHandle(data.view(interpreter._get_np_dtype(dtype)), dtype)


def _wide(x):
    is_raw = isinstance(x, TensorHandle) and x.dtype.scalar in RAW
    return _to(x, tl.float32) if is_raw else x


def _computed(original):
    """Compute on the values of bf16 and float8, not on their bits."""

    @functools.wraps(original)
    def compute(self, *args):
        raw = [x.dtype.scalar for x in args if isinstance(x, TensorHandle)]
        raw = [dtype for dtype in raw if dtype in RAW]
        if not raw:
            return original(self, *args)
        got = original(self, *map(_wide, args))
        if got.data.dtype == np.bool_:  # a comparison
            return TensorHandle(got.data, tl.int1)
        return _to(got, raw[0])

    return compute


def _multiplied(original):
    """Multiply matrices of values; the accumulator has its own dtype."""

    def create_dot(self, a, b, *rest):
        return original(self, _wide(a), _wide(b), *rest)

    return create_dot


def _cast(original):
    """Cast between bf16 or float8 and integers through float32."""

    def cast_impl(self, src, dst_type):
        src, dst = _wide(src), dst_type.scalar
        if dst not in RAW:
            return original(self, src, dst_type)
        return _to(original(self, src, tl.float32), dst)

    return cast_impl


def _numbers_first(op):
    """Of a number and a NaN take the number, as tl.maximum does unless it is told otherwise."""
    return lambda original: lambda self, a, b: self.binary_op(a, b, op)


def _clamped(original):
    """Clamp a NaN to the lower bound, unless NaNs are to be handed on."""

    def create_clampf(self, x, low, high, propagate):
        if propagate == interpreter._ir.PROPAGATE_NAN.ALL:
            return original(self, x, low, high, propagate)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    return create_clampf


def _launched(original):
    """Know the memory of the tensors that a kernel is given; expect no traps of numpy."""

    def call(self, *args, **kwargs):
        InterpreterBuilder.patched = set()
        InterpreterBuilder.memory = sorted(set(_storages((args, tuple(kwargs.values())))))
        with np.errstate(all="ignore"):
            return original(self, *args, **kwargs)

    return call


def _patched_once(original):
    """Patch what a module calls the language once a launch, not for 1 ms at every call."""

    def patch(fn):
        if id(fn.__globals__) in InterpreterBuilder.patched:
            return None
        InterpreterBuilder.patched.add(id(fn.__globals__))
        return original(fn)

    return patch


def _looked_up(original):
    """Remember the dtypes of numpy: the interpreter builds its table of them at every call."""
    known = functools.lru_cache(original)
    return lambda dtype: original(dtype) if dtype.scalar.is_ptr() else known(dtype.scalar)


def _storages(x):
    if isinstance(x, tuple):
        for y in x:
            yield from _storages(y)
    elif isinstance(x, TensorDescriptor):
        yield from _storages(x.base)
    elif isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check(builder, pointers, mask):
    here = np.asarray(mask.data).astype(np.bool_)  # a mask may be kept as integers
    at = pointers.data[np.broadcast_to(here, pointers.data.shape)]
    if at.size:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        low, high = int(at.min()), int(at.max()) + size
        if not any(start <= low and high <= end for start, end in builder.memory):
            raise StrayAddressError(f"{at.size} addresses from {low:#x} to {high:#x}")


def _loaded(original):
    """Refuse stray addresses; what a mask leaves out is undefined, not zero: fill it with ones."""

    def create_masked_load(self, pointers, mask, other, *rest):
        _check(self, pointers, mask)
        # (of a single lane the interpreter takes `other=0` for no other)
        if other is None and pointers.data.size > 1 and not np.all(mask.data):
            dtype = pointers.get_element_ty()
            number = interpreter._get_np_dtype(dtype)
            junk = np.full((*pointers.data.shape, number.itemsize), 255, np.uint8).view(number)
            other = TensorHandle(junk[..., 0], dtype)
        return original(self, pointers, mask, other, *rest)

    return create_masked_load


def _stored(original):
    """Refuse stray addresses."""

    def create_masked_store(self, pointers, value, mask, *rest):
        _check(self, pointers, mask)
        return original(self, pointers, value, mask, *rest)

    return create_masked_store


_PARTS = (
    (interpreter, "_convert_float", _converted),
    (InterpreterBuilder, "binary_op", _computed),
    (InterpreterBuilder, "unary_op", _computed),
    (InterpreterBuilder, "create_fma", _computed),
    (InterpreterBuilder, "create_dot", _multiplied),
    (InterpreterBuilder, "cast_impl", _cast),
    (InterpreterBuilder, "create_maxnumf", _numbers_first(np.fmax)),
    (InterpreterBuilder, "create_minnumf", _numbers_first(np.fmin)),
    (InterpreterBuilder, "create_clampf", _clamped),
    (InterpreterBuilder, "create_masked_load", _loaded),
    (InterpreterBuilder, "create_masked_store", _stored),
    (GridExecutor, "__call__", _launched),
    (interpreter, "_patch_lang", _patched_once),
    (interpreter, "_get_np_dtype", _looked_up),
)
