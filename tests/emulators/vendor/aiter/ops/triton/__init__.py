"""AITER's Triton kernels."""
