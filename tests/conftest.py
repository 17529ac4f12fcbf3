"""Run Triton kernels in its interpreter where no CUDA device is: the first thing that tests do."""

import os
import pathlib
import sys
from importlib.util import find_spec

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, and never again
    import interpreter

    interpreter.install()
