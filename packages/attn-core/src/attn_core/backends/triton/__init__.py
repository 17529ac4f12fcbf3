"""Triton kernels over a paged cache, portable and for Hopper."""
