"""Our own kernels of sparse MLA (DSA): index scores, their selection, attention over it."""
