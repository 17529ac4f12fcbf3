"""Emulates torch-npu 2.13: its operators, with the wheel's own schemas, on a CPU."""

from npu_ops import OPS

globals().update(OPS)
