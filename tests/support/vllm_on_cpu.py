"""A plugin of vLLM that puts attn-core where vLLM's CPU platform looks, which reads no flag."""

import os
import pathlib

PATH = "attn_core.integrations.vllm.Backend"


def register_on_cpu():
    """Stand in for `--attention-backend CUSTOM`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)


def environment(plugin=None):
    """Return the environment of a process of vLLM; plugin: what `install` returns, or none."""
    support = str(pathlib.Path(__file__).parent)
    path = os.pathsep.join(filter(None, [plugin, support, os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip


def install(folder):
    """Make a folder that, on PYTHONPATH, brings the plugin to every process of vLLM."""
    info = pathlib.Path(folder, "vllm_on_cpu-1.dist-info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 1\n")
    entry = "[vllm.general_plugins]\non_cpu = vllm_on_cpu:register_on_cpu\n"
    (info / "entry_points.txt").write_text(entry)
    return str(folder)
