"""flashinfer.gdn_kernels 0.6.14: the kernels beneath gdn_decode and gdn_prefill."""
