"""`python -m attn_intel.cpu`: compile the kernels of intel_amx into the user's cache."""

from __future__ import annotations

import sys

from attn_intel.cpu.build import build, folders, found


def main() -> None:
    """Compile into the user's cache, unless the library is there."""
    path = found()
    if path is None:
        print("attn-intel: compiling the kernels of intel_amx, about 10 s", flush=True)
        try:
            path = build(folders()[1])
        except (RuntimeError, OSError) as error:
            sys.exit(f"attn-intel: {error}")
    print(path)


if __name__ == "__main__":
    main()
