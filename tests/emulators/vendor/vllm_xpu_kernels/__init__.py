"""vllm_xpu_kernels 0.1.16.2, emulated: attention alone."""
