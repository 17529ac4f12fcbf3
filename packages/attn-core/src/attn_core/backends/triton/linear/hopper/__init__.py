"""Gluon kernels of linear attention for Hopper."""
