"""AITER, AMD's library of kernels."""
