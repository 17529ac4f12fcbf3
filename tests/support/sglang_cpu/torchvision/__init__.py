"""A torchvision without functions: SGLang imports it, and no test here decodes a picture."""

import importlib.machinery
import sys
import types

__version__ = "0.26.0"
__spec__ = importlib.machinery.ModuleSpec(__name__, None, is_package=True)
_SUBMODULES = (
    "io",
    "ops",
    "models",
    "utils",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Placeholder(metaclass=_AnyAttribute):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is not installed")


def _add(name):
    module = types.ModuleType(f"{__name__}.{name}")
    module.__path__ = []

    def attribute(wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return _Placeholder

    module.__getattr__ = attribute
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


for _name in _SUBMODULES:
    _add(_name)
