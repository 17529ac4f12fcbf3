"""Make what these tests share importable: how sources are read, and where the wheels lie."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
