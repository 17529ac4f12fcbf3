"""Text fits a terminal of 80 columns whole, and a pipe gets it plain, one fact per line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from attn_core.cli.console import _widths

fcntl = pytest.importorskip("fcntl", reason="pseudo terminals are POSIX")
pty = pytest.importorskip("pty", reason="pseudo terminals are POSIX")
import struct  # noqa: E402
import termios  # noqa: E402

COMMANDS = {
    "backends": ["backends"],
    "matrix": ["matrix"],
    "doctor": ["doctor", "--device", "cuda:sm90"],
    "select": ["select", "--device", "cuda:sm90", "--page-size", "16"],
    "refused": ["select", "--device", "cuda:sm100", "--attention-backend", "trtllm_mla"],
    "why-not": ["why-not", "trtllm_mha", "--device", "cuda:sm90", "--page-size", "8"],
}
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
RUN = [sys.executable, "-c", "from attn_core.cli import main; main()"]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("ATTN_") and name not in ("COLUMNS", "LINES", "FORCE_COLOR")
} | {"TERM": "xterm-256color"}


def in_terminal(arguments, columns=80):
    """Run in a pseudo terminal; return what it was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [*RUN, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the other side has closed
            break
        if not piece:
            break
        sent += piece
    os.close(ours)
    process.wait(timeout=60)
    return sent.decode().replace("\r\n", "\n")


def in_pipe(*arguments):
    return subprocess.run(
        [*RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        check=False,
    ).stdout


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
def test_a_terminal_of_80_columns_gets_every_word_and_no_longer_line(command):
    shown = ESCAPES.sub("", in_terminal(COMMANDS[command]))
    assert shown.strip()
    # a command to copy and an error stay one line each, which the terminal breaks as it likes
    lines = [x.rstrip() for x in shown.splitlines() if not x.startswith(("  pip ", "attn: "))]
    assert max(map(len, lines)) <= 80
    if command in ("select", "why-not"):  # folded between words: the same words in one order
        assert shown.split() == in_pipe(*COMMANDS[command]).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_plain_text(command):
    plain = in_pipe(*COMMANDS[command])
    assert plain.strip()
    assert "\x1b" not in plain
    assert "\r" not in plain
    if command == "select":  # a fact per line, for grep
        lines = plain.splitlines()
        (line,) = [x for x in lines if x.startswith("  decode   trtllm_mla ")]
        assert line.endswith("page_size 16 (supports 32, 64)")


@pytest.mark.parametrize("columns", [80, 60])
def test_no_cell_of_the_backends_is_cut(columns):
    listed = json.loads(in_pipe("backends", "--json"))
    names, kinds, origins, libraries, here = cells(
        ESCAPES.sub("", in_terminal(["backends"], columns))
    )
    for column, field in ((names, "name"), (origins, "origin"), (here, "here")):
        title = {"name": "backend", "origin": "from"}.get(field, f"on{listed['device']}")
        whole = "".join(entry[field].replace(" ", "") for entry in listed["backends"])
        assert column == title + whole
    assert kinds == "kinds" + "".join(",".join(x["kinds"]) for x in listed["backends"])
    for entry in listed["backends"]:
        for name, version in entry["libraries"].items():
            assert f"{name}{version or 'notinstalled'}" in libraries


def test_names_stay_whole_at_80_columns():
    shown = ESCAPES.sub("", in_terminal(["matrix"]))
    for kind, backends in json.loads(in_pipe("matrix", "--format", "json")).items():
        assert re.search(rf"^{kind} *$", shown, re.M)
        for name in backends:
            assert re.search(rf"^{name}  ", shown, re.M)


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
