"""vllm-xpu-kernels, the library of kernels for Intel GPUs."""
