"""The operations as Triton kernels."""
