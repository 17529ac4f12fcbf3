"""The part of vLLM that SGLang imports on a CPU without kernels of its own."""
