"""`python -m attn_intel.cpu`: compile the kernels of intel_amx into the user's cache."""

from __future__ import annotations

import sys

from attn_intel.cpu.build import build, cache, compiled_library, distrusted


def main() -> None:
    """Compile into the user's cache, unless the library is there."""
    path, folder = compiled_library(), cache()
    if path is None:
        if folder is None:
            sys.exit("attn-intel: this user has no home folder; set XDG_CACHE_HOME to a folder")
        print("attn-intel: compiling the kernels of intel_amx, about 10 s", flush=True)
        try:
            path = build(folder)
        except RuntimeError as error:
            sys.exit(f"attn-intel: {error}")
        except OSError as error:
            sys.exit(
                f"attn-intel: cannot write into {folder}: {error}; set XDG_CACHE_HOME to a folder "
                "that this user can write"
            )
        if (reason := distrusted(path)) is not None:
            sys.exit(f"attn-intel: {path} is compiled and will not be loaded: {reason}")
    print(path)


if __name__ == "__main__":
    main()
