"""A plugin of vLLM that puts attn-core where vLLM's CPU platform looks, which reads no flag."""

import pathlib

PATH = "attn_core.integrations.vllm.Backend"


def register_on_cpu():
    """Stand in for `--attention-backend CUSTOM`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)


def install(folder):
    """Make a folder that, on PYTHONPATH, brings the plugin to every process of vLLM."""
    info = pathlib.Path(folder, "vllm_on_cpu-1.dist-info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 1\n")
    entry = "[vllm.general_plugins]\non_cpu = vllm_on_cpu:register_on_cpu\n"
    (info / "entry_points.txt").write_text(entry)
    return str(folder)
