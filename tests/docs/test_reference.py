"""The reference leaves nothing out: every public name, every field with its default."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import runpy
import tomllib

import attn_core
import pytest
from attn_core.cli.app import COMMANDS
from attn_core.plugins import hookspecs
from attn_core.plugins.registry import load_plugins
from attn_core.tools.matrix import build_matrix

ROOT = pathlib.Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
DATA = ("Capabilities", "BackendSpec", "Requirements", "LayerRequirements", "Speculation", "Device")


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


DOCUMENTED = {  # heads of the matrix that SGLang documents
    "MHA": ["FP8 KV Cache", "FP4 KV Cache", "Spec topk=1", "Spec topk>1", "Sliding Window"],
    "MLA": ["Native Page Sizes", "FP8 KV Cache", "FP4 KV Cache", "Chunked Prefix Cache"],
    "GDN": ["Decode", "Prefill / Extend", "Spec Decoding (Target Verify)"],
}


def tables(text):
    """Read the tables of a page: first word of the heading → header and rows, tags left out."""
    result = {}
    for heading, body in re.findall(r"^##+ (\w+) \(.*?\n(.*?)(?=^##|\Z)", text, re.S | re.M):
        lines = [x for x in re.sub(r"<[^>]*>", " ", body).splitlines() if x.startswith("| ")]
        cells = [[c.strip() for c in x.strip("|").split("|")] for x in lines]
        result[heading] = (cells[0], cells[2:])
    return result


@pytest.mark.parametrize("file", ["README.md", "docs/reference/support-matrix.md"])
def test_the_matrix_has_the_documented_words_and_a_mark_in_each_cell(file):
    text = (ROOT / file).read_text()
    result = tables(text.partition("<!-- matrix:end -->")[0])
    for kind, words in DOCUMENTED.items():
        header, rows = result[kind]
        assert header[:2] == ["Backend", "Devices"]
        assert set(words) <= set(header), kind
        assert "_" not in "".join(header), "a head is words, not a field's name"
        for row in rows:
            assert len(row) == len(header), row
            assert all(c[0] in "●◑◔○-" for c in row[2:]), row


def test_a_mark_says_how_far_a_cell_is_proved():
    page = (REFERENCE / "support-matrix.md").read_text()
    result = tables(page)
    for kind, backends in build_matrix(load_plugins()).items():
        header, rows = result[kind.upper()]
        by_name = {re.match(r"\*\*([^*<]+)", row[0])[1]: row for row in rows}
        assert set(by_name) == set(backends)
        for name, cells in backends.items():
            assert ("*not implemented*" in by_name[name][0]) == (not cells["implemented"])
            if "fp8_kv" in cells:
                level = cells["evidence"]["fp8_kv"] if cells["fp8_kv"] else "no"
                mark = {"device-tested": "●", "compiled": "◑", "emulated": "◔", "no": "-"}
                assert by_name[name][header.index("FP8 KV Cache")][0] == mark.get(level, "○")
            for why in cells["matrix_deviations"].values():
                assert why in page, name


def test_the_home_page_shows_a_decision_a_plot_and_three_ways_in():
    page = (ROOT / "docs" / "index.md").read_text()
    before = page[: page.index("{toctree}")]
    assert before.count("\n") < 60, "it is one screen"
    assert "$ attn select" in before
    assert "_static/speed.html" in before
    assert len(re.findall(r"^- \*\*\[", before, re.M)) == 3
    assert (ROOT / "docs/_static/speed.html").read_text().count('class="bar"') >= 5


def test_the_footer_names_the_holder_of_the_copyright():
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert conf["author"] in conf["project_copyright"]
    for file in (*conf["html_css_files"], *conf["html_js_files"]):
        assert (ROOT / "docs/_static" / file).exists(), file


def test_the_transformers_page_has_every_supported_model():
    pytest.importorskip("transformers")
    from attn_core.integrations.transformers import SUPPORTED

    page = (ROOT / "docs" / "how-to" / "transformers.md").read_text()
    (section,) = re.findall(r"^## Which models\n(.*?)^## ", page, re.S | re.M)
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (?!family).*$", section, re.M)))
    assert sorted(named) == sorted(SUPPORTED)


def test_the_install_page_has_every_extra():
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    project = tomllib.loads((ROOT / "packages/attn-core/pyproject.toml").read_text())["project"]
    (table,) = re.findall(r"^\| extra of attn-core .*?\n\n", page, re.S | re.M)
    first = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert set(re.findall(r"`([\w-]+)`", "".join(first))) == set(project["optional-dependencies"])


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
