"""Mark `long` what attends as another family does: `nox -s families` runs all of it."""

import pytest
from tiny_models import FAMILIES

# One of each kind of layer is left: windows and a softcap, sinks, latents, a tower, GDN, KDA
SHOWN = (
    "llama", "gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next", "kimi_linear",
    "qwen2_vl",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = None if callspec is None else callspec.params.get("name")
        if name in FAMILIES and name not in SHOWN:
            item.add_marker(pytest.mark.long)
