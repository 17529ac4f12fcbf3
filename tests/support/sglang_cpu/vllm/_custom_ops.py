"""One operator that SGLang looks up and does not call with its PyTorch implementation."""


def rotary_embedding(*args, **kwargs):
    raise NotImplementedError("vllm is not installed")
