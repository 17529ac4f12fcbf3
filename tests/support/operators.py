"""Names of torch's operators, in the order in which they run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Collects in `names` which operators run under it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
