"""Make the benchmarks importable, as they are for `python -m` in the root of the repository."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
