"""The instructions that a kernel may multiply by."""

from dataclasses import dataclass
from enum import Enum


class MMAType(Enum):
    F32_16x16x16_F16 = 0x1020
    F32_32x32x8_F16 = 0x1021
    F32_16x16x32_K8_F16 = 0x1022
    F32_32x32x16_K8_F16 = 0x1023


class MMAOperand(Enum):
    M = 0
    N = 1
    K = 2


@dataclass
class GenericDot:
    out_vec_size: int = 1
    k_vec_size: int = 4
    k_mult: int = 1
    along_dim: MMAOperand = MMAOperand.N
