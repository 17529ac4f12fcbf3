"""The reference leaves nothing out: every public name, every field with its default."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re

import attn_core
import pytest
from attn_core import hookspecs
from attn_core.cli.app import COMMANDS

ROOT = pathlib.Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
DATA = ("Capabilities", "BackendSpec", "Requirements", "LayerNeeds", "Speculation", "Device")


def test_the_api_page_has_every_public_name():
    page = (REFERENCE / "api.md").read_text()
    named = set(re.findall(r"attn_core\.(\w+)$", page, re.M))
    assert named == set(attn_core.__all__) - {"__version__"}


def test_types_are_declared_for_every_public_name():
    """A lazy module hides its types; the stub beside it has them, and names the same home."""
    stub = pathlib.Path(attn_core.__file__).with_suffix(".pyi")
    homes = {
        alias.asname: node.module
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == {name: f"attn_core.{home}" for name, home in attn_core._NAMES.items()}


def test_the_hooks_page_has_every_hook():
    page = (REFERENCE / "hooks.md").read_text()
    hooks = {n for n in vars(hookspecs) if n.startswith("attn_register")}
    assert set(re.findall(r"hookspecs\.(attn_register\w+)$", page, re.M)) == hooks


def test_the_command_page_has_every_command():
    page = (REFERENCE / "cli.md").read_text()
    assert set(re.findall(r"^## attn (.*)$", page, re.M)) == set(COMMANDS)


@pytest.mark.parametrize("name", DATA)
def test_every_field_is_explained_with_its_default(name):
    page = (REFERENCE / "capabilities.md").read_text()
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.S | re.M)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.+) \|$", section, re.M)
    fields = dataclasses.fields(getattr(attn_core, name))
    assert [row[0] for row in rows] == [f.name for f in fields]
    for (_, default, meaning), field in zip(rows, fields, strict=True):
        assert meaning.strip()
        if field.default is not dataclasses.MISSING and field.default.__hash__ is not None:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            assert default == "required", field.name
            continue
        plain = value is None or isinstance(value, bool | int | str)
        if plain:
            shown = repr(value).replace("'", '"')
            assert default == f"`{shown}`", field.name
        else:  # a collection, said in words
            assert default not in ("required", ""), field.name
            assert ("any" in default or "none" in default) == (not value), field.name
