"""Mark `long` the families that attend as another one does; `nox -s families` runs them too."""

import pytest
from tiny_models import FAMILIES

# They differ in a kind of layer: windows and a softcap, sinks, latents, a vision tower, GDN, KDA
BY_DEFAULT = (
    "llama", "gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next", "kimi_linear",
    "qwen2_vl",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = None if callspec is None else callspec.params.get("name")
        if name in FAMILIES and name not in BY_DEFAULT:
            item.add_marker(pytest.mark.long)
