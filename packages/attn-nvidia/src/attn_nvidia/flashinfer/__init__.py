"""FlashInfer's kernels, the tuned backend of every CUDA architecture from sm80."""
