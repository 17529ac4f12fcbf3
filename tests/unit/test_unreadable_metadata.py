"""Distributions whose METADATA is lost or is no text: they are named, and break nothing else."""

import pytest
from attn_core.plugins.dependencies import Pin, installed, strangers
from attn_core.plugins.registry import load_plugins
from attn_core.testing.evidence import versions

LATIN = b"Metadata-Version: 2.1\nName: acme-kernels\nVersion: 2.0\nAuthor: J\xf6rg\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of one distribution on the path, without METADATA."""
    info = tmp_path / "acme_kernels-2.0.dist-info"
    info.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return info


def test_a_plugin_whose_metadata_is_no_text_is_broken_and_others_are_not(folder):
    (folder / "METADATA").write_bytes(LATIN)
    (folder / "entry_points.txt").write_text("[attn_core]\nacme = attn_acme\n")
    registry = load_plugins()
    assert registry.get("torch_native")
    [broken] = [b for b in registry.broken if b.name == "acme"]
    assert broken.error.startswith("UnicodeDecodeError")
    assert broken.origin.module == "attn_acme"


def test_a_library_whose_metadata_is_lost_is_not_installed(folder):
    """A removal may leave its folder: in no version is the library here."""
    (folder / "RECORD").write_text("")
    assert installed(["acme-kernels>=1"]) == {}


def test_a_library_whose_metadata_is_no_text_is_not_installed(folder):
    (folder / "METADATA").write_bytes(LATIN)
    assert installed(["acme-kernels>=1"]) == {}
    (folder / "METADATA").write_bytes(LATIN.replace(b"\xf6", b"oe"))
    assert installed(["acme-kernels>=1"]) == {"acme-kernels": "2.0"}


def test_a_removed_version_does_not_hide_the_one_that_is_there(folder):
    whole = folder.with_name("acme_kernels-3.0.dist-info")
    whole.mkdir()
    (whole / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 3.0\n")
    assert installed(["acme-kernels>=1"]) == {"acme-kernels": "3.0"}


def test_a_plugin_of_which_nothing_is_text_is_broken_and_others_are_not(folder):
    (folder / "METADATA").write_bytes(LATIN)
    (folder / "entry_points.txt").write_bytes(b"[attn_core]\nacme = attn_\xf6\n")
    registry = load_plugins()
    assert registry.get("torch_native")
    [broken] = [b for b in registry.broken if b.error.startswith("UnicodeDecodeError")]
    assert broken.origin.module == "entry_points.txt"


def test_what_asks_for_others_is_not_ended_by_it(folder):
    (folder / "METADATA").write_bytes(LATIN)
    pin = Pin(distribution="triton", torch="", version="==3.6.0", why="", module="triton")
    assert strangers(pin) == []
    assert "acme-kernels" not in versions(load_plugins().get("torch_native"), ["acme-kernels"])
