"""Gluon kernels for Hopper."""
