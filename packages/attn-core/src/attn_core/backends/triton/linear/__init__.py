"""Triton's kernels of gated linear attention: GDN and KDA."""
