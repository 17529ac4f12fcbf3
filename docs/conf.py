"""How Sphinx builds these pages; `nox -s docs` runs it with every warning an error."""

from __future__ import annotations

import re
from typing import Any

import attn_core

project = "attn-core"
author = "the attn-core contributors"
project_copyright = f"2026, {author}. Apache License 2.0"
version = release = attn_core.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["examples", "explanation/decisions/README.md"]
html_theme = "furo"
html_title = f"attn-core {release}"
html_copy_source = False
html_static_path = ["_static"]
html_extra_path = ["site"]  # the explorer, which is no page of Sphinx
html_css_files = ["attn.css"]
html_js_files = ["matrix.js"]
smartquotes = False  # an option is --json, with two hyphens
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_display_short_literal_types = True


def _plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Take docstrings as they are written: text with `code`, in which * and | mean nothing."""
    for i, line in enumerate(lines):
        parts = re.split(r"(`[^`]+`)", line)
        lines[i] = "".join(
            f"`{part}`" if j % 2 else re.sub(r"([\\*|_])", r"\\\1", part)
            for j, part in enumerate(parts)
        )


def _defaults(app: Any, what: str, name: str, obj: Any, options: Any, *texts: Any) -> Any:
    """Write the default of a field that a factory makes as "...", which can be parsed."""
    signature, returns = texts
    return (signature and signature.replace("<factory>", "..."), returns)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _defaults)
    app.connect("autodoc-process-docstring", _plain)
