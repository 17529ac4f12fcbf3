"""Every command and every Python block of the documentation runs and shows what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import sys
from dataclasses import dataclass

import pytest
from attn_core import cli, load_plugins
from attn_core.spec.device import ARCHS

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
ACME = DOCS / "examples" / "attn-acme"
PAGES = {
    str(path.relative_to(DOCS)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if "examples" not in path.parts
}


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it; no output shown means that only the exit code counts."""

    command: str
    output: str
    code: int


def shown(text):
    """Read the commands of a page; `$ echo $?` shows the exit code of the one before it."""
    result = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            if command == "echo $?":
                last = result.pop()
                result.append(Shown(last.command, last.output, int(output)))
            else:
                result.append(Shown(command, output, 0))
    return result


def pattern(output):
    """A line that is … stands for any lines, … within a line for any text, spaces for spaces."""
    lines = []
    for line in output.splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
        else:
            words = [re.escape(piece) for piece in line.rstrip().split("…")]
            lines.append(".*?".join(words) + r" *\n")
    return "".join(lines)


COMMANDS = [
    # the conformance suite of the example is a session of its own, too
    pytest.param(page, example, marks=pytest.mark.long if " check " in example.command else ())
    for page, text in PAGES.items()
    for example in shown(text)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of model directories, each with the config.json of a published model."""
    folder = tmp_path_factory.mktemp("models")
    for config in (ROOT / "tests/data/configs").glob("*.json"):
        (folder / config.stem).mkdir()
        (folder / config.stem / "config.json").write_text(config.read_text())
    return folder


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install attn-acme as a development install does: its source on the path, its metadata."""
    info = tmp_path / "attn_acme-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attn-acme\nVersion: 1.0.0\nRequires-Dist: attn-core==0.1.*\n"
    )
    (info / "entry_points.txt").write_text("[attn_core]\nacme = attn_acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ACME / "src"))
    yield
    for name in ("attn_acme", "attn_acme.backend"):
        sys.modules.pop(name, None)


def test_the_example_plugin_passes_the_conformance_suite(acme, run_quick_checks):
    """A short part of what its own test and the tutorial's `attn check acme` run."""
    ran = run_quick_checks(load_plugins().get("acme"))
    assert any("lse" in check for check in ran), "the row declares the LSE"
    assert any("window" in check for check in ran), "the row declares windows"


def run(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    text, code = io.StringIO(), 0
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    return text.getvalue(), code


@pytest.mark.parametrize(("page", "example"), COMMANDS, ids=lambda x: getattr(x, "command", x))
def test_a_command_does_what_its_page_shows(page, example, models, monkeypatch, request):
    assert example.command.startswith("attn "), "only commands that a test can run are shown"
    if page.startswith("tutorial/"):
        request.getfixturevalue("acme")
    for name in [n for n in os.environ if n.startswith("ATTN_") or n == "COLUMNS"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(models)
    text, code = run(example.command, monkeypatch)
    assert code == example.code, text
    if example.output:
        assert re.fullmatch(pattern(example.output), text), f"{example.output}\n--- is\n{text}"


@pytest.mark.parametrize("arch", ARCHS["cpu"])
def test_the_tutorial_shows_the_same_on_every_cpu(arch, models, monkeypatch, request):
    """Its reader has any of them, and so does what runs this."""
    monkeypatch.setattr("attn_core.spec.device._cpu_arch", lambda: arch)
    page = "tutorial/first-plugin.md"
    examples = [e for e in shown(PAGES[page]) if " check " not in e.command]
    assert len(examples) >= 3
    for example in examples:
        test_a_command_does_what_its_page_shows(page, example, models, monkeypatch, request)


def test_there_are_commands_and_a_wrong_output_is_noticed(models, monkeypatch):
    assert len(COMMANDS) >= 20
    (wrong,) = shown("```console\n$ attn select --device cuda:sm90\non cuda:sm80\n…\n```\n")
    with pytest.raises(AssertionError, match="on cuda:sm80"):
        test_a_command_does_what_its_page_shows("a", wrong, models, monkeypatch, None)


PYTHON = {
    page: "\n".join(blocks)
    for page, text in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, re.S | re.M))
}


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page):
    exec(compile(PYTHON[page], str(DOCS / page), "exec"), {"__name__": "docs"})


FIGURE = re.compile(r"(\d+(?:\.\d+)?) ?(?:%|\u00d7|x faster|tok/s|tokens/s|GB/s)")


def test_no_figure_without_a_recorded_measurement():
    """Percentages, ratios and rates in the pages must stand in benchmarks/results."""
    results = "".join(
        json.dumps(json.loads(p.read_text())) for p in (ROOT / "benchmarks/results").glob("*.json")
    )
    generated = {f"reference/{name}.md" for name in ("support-matrix", "cli", "performance")}
    for page, text in PAGES.items():
        if page in generated or page.startswith("explanation/decisions/"):
            continue
        for figure in FIGURE.findall(text):
            result = re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", results)
            assert result, f"{page}: {figure} is in no result of benchmarks/"
