"""Write the generated parts of the documentation anew; --check compares (exit code 1: stale)."""

from __future__ import annotations

import pathlib
import re
import sys

from attn_core.matrix import build_matrix, to_markdown
from attn_core.plugins import load_plugins

ROOT = pathlib.Path(__file__).parent.parent
MARK = re.compile(r"(<!-- matrix:begin -->\n).*?(<!-- matrix:end -->)", re.S)


def pages() -> dict[pathlib.Path, str]:
    """Return the text that every generated page should have."""
    registry = load_plugins()
    reference = (
        "# Support matrix\n\nGenerated from the rows of the installed packages and their evidence "
        "files by `python docs/generate.py`.\nyes* and no*: differs from the matrix that SGLang "
        "documents, the note below each table says why.\n\n"
    )
    readme = ROOT / "README.md"
    kinds = to_markdown(build_matrix(registry, ("mha", "mla", "gdn")), notes=False)
    return {
        ROOT / "docs/reference/support-matrix.md": reference + to_markdown(build_matrix(registry)),
        readme: MARK.sub(lambda m: m[1] + kinds + m[2], readme.read_text()),
    }


def main() -> int:
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path])
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
