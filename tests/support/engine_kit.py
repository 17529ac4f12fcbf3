"""Run the attention tests that SGLang ships on a CPU: the arguments of benchmarks.engines.kit.

Graphs are replayed by torch_native, planned anew, and never captured. The kit's module of dual
chunk attention imports SGLang's own backend, whose kernels need a GPU.
"""

import dataclasses
import sys
import types

import attn_core
from attn_core.integrations import choice

NEED_A_GPU = ("sglang.srt.layers.attention.dual_chunk_flashattention_backend",)


def graphed():
    """Return the built-in plugins with one backend, a torch_native whose passes are replayed."""
    result = attn_core.load_plugins()
    native = result.get("torch_native", "softmax")
    rows = [dataclasses.replace(row, cuda_graph="uniform") for row in native.capabilities]
    able = dataclasses.replace(native, capabilities=rows, create="graphed:Graphed")
    return dataclasses.replace(result, backends={("softmax", "torch_native"): able})


def main():
    """Run the kit; its exit code."""
    for name in NEED_A_GPU:
        sys.modules[name] = types.ModuleType(name)
    choice.load_plugins = graphed
    from benchmarks.engines import kit

    return kit.main()


if __name__ == "__main__":
    sys.exit(main())
