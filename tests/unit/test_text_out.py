"""Text fits 80 columns whole where they are set, and a pipe gets it plain, one fact per line."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from attn_core import cli
from attn_core.cli.console import _widths

COMMANDS = {
    "backends": ["backends"],
    "matrix": ["matrix"],
    "doctor": ["doctor", "--device", "cuda:sm90"],
    "select": ["select", "--device", "cuda:sm90", "--page-size", "16"],
    "refused": ["select", "--device", "cuda:sm100", "--attention-backend", "trtllm_mla"],
    "why-not": ["why-not", "trtllm_mha", "--device", "cuda:sm90", "--page-size", "8"],
}


@pytest.fixture
def attn(monkeypatch, capsys):
    """Return what runs `attn` for a pipe, or in so many columns, and returns what it says."""
    for name in [n for n in os.environ if n.startswith("ATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: str, columns: int | None = None) -> str:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["attn", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        return "".join(capsys.readouterr())

    return run


def cells(text):
    """Put the cells of a printed table together again, without their spaces.

    A column starts after two spaces that every line of the table has there.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    width = max(map(len, lines))
    lines = [line.ljust(width) for line in lines]
    gaps = [all(line[i] == " " for line in lines) for i in range(width)]
    starts = [0] + [i for i in range(2, width) if gaps[i - 2] and gaps[i - 1] and not gaps[i]]
    pieces = [
        [line[a:b].replace(" ", "") for a, b in zip(starts, [*starts[1:], width], strict=True)]
        for line in lines
    ]
    return ["".join(column) for column in zip(*pieces, strict=True)]


@pytest.mark.parametrize("command", COMMANDS)
def test_80_columns_get_every_word_and_no_longer_line(command, attn):
    shown = attn(*COMMANDS[command], columns=80)
    assert shown.strip()
    # a command to copy and an error stay one line each, which the terminal breaks as it likes
    lines = [x.rstrip() for x in shown.splitlines() if not x.startswith(("  pip ", "attn: "))]
    assert max(map(len, lines), default=0) <= 80
    if command in ("select", "why-not"):  # folded between words: the same words in one order
        assert shown.split() == attn(*COMMANDS[command]).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_plain_text(command, attn):
    plain = attn(*COMMANDS[command])
    assert plain.strip()
    assert "\x1b" not in plain
    assert "\r" not in plain
    if command == "select":  # a fact per line, for grep
        lines = plain.splitlines()
        (line,) = [x for x in lines if x.startswith("  decode   trtllm_mla ")]
        assert line.endswith("page_size 16 (supports 32, 64)")


@pytest.mark.parametrize("columns", [80, 60])
def test_no_cell_of_the_backends_is_cut(columns, attn):
    listed = json.loads(attn("backends", "--json"))
    names, kinds, origins, libraries, here = cells(attn("backends", columns=columns))
    for column, field in ((names, "name"), (origins, "origin"), (here, "here")):
        title = {"name": "backend", "origin": "from"}.get(field, f"on{listed['device']}")
        whole = "".join(entry[field].replace(" ", "") for entry in listed["backends"])
        assert column == title + whole
    assert kinds == "kinds" + "".join(",".join(x["kinds"]) for x in listed["backends"])
    for entry in listed["backends"]:
        for name, version in entry["libraries"].items():
            assert f"{name}{version or 'notinstalled'}" in libraries


@pytest.mark.parametrize("columns", [50, 40])
def test_a_narrow_terminal_gets_paragraphs(columns, attn):
    """In a table, words would stand there letter below letter."""
    listed = json.loads(attn("backends", "--json"))
    shown = attn("backends", columns=columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "\ndual_chunk_flash_attn\n  kinds  mha\n" in shown
    for entry in listed["backends"]:
        for word in (entry["name"], *entry["origin"].split(), *entry["libraries"]):
            assert word in shown


def test_names_stay_whole_at_80_columns(attn):
    shown = attn("matrix", columns=80)
    for kind, backends in json.loads(attn("matrix", "--format", "json")).items():
        assert re.search(rf"^{kind} *$", shown, re.M)
        for name in backends:
            assert re.search(rf"^{re.escape(name)}  ", shown, re.M)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (100, [4, 19, 9]),  # all of it
        (24, [4, 13, 7]),  # the longest words, and an equal share of what is left
        (28, [4, 15, 9]),  # of which nobody takes more than it needs
        (10, [4, 3, 3]),  # words break, names last
        (5, [3, 1, 1]),
        (1, [1, 1, 1]),  # a terminal that nobody has: no endless loop
    ],
)
def test_columns_share_the_room(room, expected):
    assert _widths([["name", "libraries", "on"], ["x", "flashinfer and more", "for cuda9"]], room) \
        == expected  # fmt: skip
