"""Kernels for every GPU that Triton compiles for."""
