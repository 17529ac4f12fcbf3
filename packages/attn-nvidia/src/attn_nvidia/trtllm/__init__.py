"""TensorRT-LLM's kernels, through FlashInfer."""
