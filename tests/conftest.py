"""Make tests/support importable, and run Triton kernels in its interpreter where no GPU is."""

import os
import pathlib
import sys
from importlib.util import find_spec

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, and never again
    import interpreter

    interpreter.install()
