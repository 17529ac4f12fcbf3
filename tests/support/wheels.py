"""Where the vendors' wheels lie unpacked, and which versions are expected there."""

from __future__ import annotations

import os
import pathlib

from signatures import Sources

TESTS = pathlib.Path(__file__).parents[1]
CONTRACTS = TESTS / "contracts"
RECORDED = CONTRACTS / "recorded"  # signatures of what is on no index
VENDOR = TESTS / "emulators" / "vendor"
HELPERS = frozenset(  # the emulations' own; torch_npu has no Python, only ops with schemas
    {"aiter_checks", "attn_reference", "fa3_leaf", "fa3_tiles", "flash_mla_leaf", "npu_gdn_leaf"}
    | {"npu_leaf", "npu_sparse_leaf", "torch_npu", "wave_checks"}
)
MISSING = (
    "the vendors' wheels are not here: `nox -s contracts` downloads and unpacks them, "
    "ATTN_WHEELS names a folder that holds them"
)


def pinned() -> dict[str, str]:
    """Return distribution → version of wheels.txt."""
    lines = (line.split("#")[0].strip() for line in (CONTRACTS / "wheels.txt").open())
    return dict(line.split("==") for line in lines if line)


def folders() -> list[pathlib.Path]:
    """List the folders of ATTN_WHEELS, each an unpacked wheel; [] where it is not set."""
    kwargs = os.environ.get("ATTN_WHEELS")
    return sorted(p for p in pathlib.Path(kwargs).iterdir() if p.is_dir()) if kwargs else []


def version_of(folder: pathlib.Path, distribution: str) -> str | None:
    """Return the version of a distribution whose dist-info lies in a folder."""
    stem = distribution.replace("-", "_")
    infos = [p.name for p in folder.glob("*.dist-info") if p.name.startswith(f"{stem}-")]
    return infos[0].removeprefix(f"{stem}-").removesuffix(".dist-info") if infos else None


def libraries() -> Sources:
    """Return the sources of all the wheels, and what stands for those that are on no index."""
    return Sources((*folders(), RECORDED))


def emulators() -> Sources:
    """Return the sources of the emulators."""
    return Sources((VENDOR,))
