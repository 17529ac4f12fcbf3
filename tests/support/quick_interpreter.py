"""Spare Triton's CPU interpreter what it does again at every step of a kernel."""

import functools

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder

# Most dtypes of most kernels, and the numbers that they are computed with as they are.
HELD = {"int1": (), "int32": (int,), "int64": (int,), "fp32": (int, float)}


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


def _asserted(original):
    """Compute no overflow for an assertion that is then left out, as it is without debug."""

    def look(self, *args):
        return original(self, *args) if self.builder.options.debug else None

    return look


def _block(original):
    """Make what a block's type holds once for all that are equal: each step makes some."""
    held = {}

    def make(self, element_ty, shape):
        sizes = tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
        of = element_ty
        if element_ty.is_ptr():  # these have no hash
            of = (element_ty.element_ty, element_ty.address_space, element_ty.const)
        if (of, sizes) not in held:
            original(self, element_ty, shape)
            held[of, sizes] = vars(self) | {"sizes": sizes}
        self.__dict__.update(held[of, sizes])

    return make


def _tensor(original):
    """Make what a tensor holds of its shape once a shape."""

    @functools.cache
    def held(sizes):
        made = object.__new__(tl.tensor)
        original(made, None, tl.block_type(tl.int32, list(sizes)) if sizes else tl.int32)
        return vars(made)

    def make(self, handle, type):
        self.__dict__.update(held(_sizes(type)), handle=handle, type=type, dtype=type.scalar)

    return make


def _sizes(type):
    """Return the shape of a type, () of a number's."""
    known = type.__dict__.get("sizes")
    if known is not None or not type.is_block():
        return known or ()
    return tuple(type.shape)


def _alike(original):
    """Check nothing of two tensors of one dtype, or a tensor and a number that it can hold."""

    def check(self, lhs, rhs, *args, **kwargs):
        if type(lhs) is tl.tensor and (name := lhs.dtype.name) in HELD:
            if type(rhs) is tl.tensor:
                if rhs.dtype is lhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) in HELD[name] and -(2**31) <= rhs < 2**31:
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return original(self, lhs, rhs, *args, **kwargs)

    return check


def _broadcast(original):
    """Leave two tensors of one shape as they are."""

    def broadcast(self, lhs, rhs):
        same = _sizes(lhs.type) == _sizes(rhs.type)
        return (lhs, rhs) if same else original(self, lhs, rhs)

    return broadcast


def _promoted(original):
    """Remember what two dtypes are computed in."""
    known = {}

    def promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        pair = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if pair not in known:
            known[pair] = original(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[pair]

    return promote


def _constant(original):
    """Remember the tensors of numbers in a kernel's text; no operation writes into one."""
    known = {}

    def constant(self, value, dtype):
        if type(dtype) is not tl.dtype:
            return original(self, value, dtype)
        key = (type(value), value, dtype.name)
        if key not in known:
            if len(known) > 1000:  # a kernel may be called with ever new numbers
                known.clear()
            known[key] = original(self, value, dtype)
        return known[key]

    return constant


PARTS = (
    (TritonSemantic, "binary_op_sanitize_overflow_impl", _asserted),
    (TritonSemantic, "binary_op_type_checking_impl", _alike),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (TritonSemantic, "computation_type_impl", _promoted),
    (TritonSemantic, "scalar_constant", _constant),
    (tl.core.block_type, "__init__", _block),
    (tl.core.tensor, "__init__", _tensor),
    (interpreter, "_patch_lang", _patched_once),
    (interpreter, "_get_np_dtype", _looked_up),
)
