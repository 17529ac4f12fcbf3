"""Make the reference backend and its mutants importable by name, as `create` names them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
