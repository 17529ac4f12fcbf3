"""Read float8 e4m3 from its bits, so that chips without float8 read it as well."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the function: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(raw):
    """Return the float32 numbers of e4m3 bits; the two NaN become ±480.

    In the places of float16's bits they are the number over 256, subnormal ones too.
    """
    bits = raw.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0
