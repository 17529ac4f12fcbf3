"""Any file: a reproducer that runs, or a sentence that says why it is none."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from attn_core import Shadow, cli
from attn_core.errors import AttnError, UsageError
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.device import Device
from attn_core.trust.files import load
from attn_core.trust.rerun import bench_for, rerun
from faulty import Served, layers, registry
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

REGISTRY = registry()
KEY = "attn_reproducer"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadow")
    shadow = Shadow("torch_native", every=1, folder=folder, registry=REGISTRY)
    every = layers(sliding_window=40, sinks=torch.randn(4))
    Served("lengthy", shadow, every_layer=every).run(
        ForwardMode.TARGET_VERIFY, [4, 4], [50, 117], return_lse=True
    )
    return shadow.difference.file


def parts(path):
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return json.loads(opened.metadata()[KEY]), tensors


def outcome(path):
    """Load a file and, if it is one, run it: anything but an AttnError is a fault of ours."""
    try:
        r = load(path)
    except UsageError as error:
        return str(error)
    try:
        rerun(r, bench_for(r, "torch_native", REGISTRY, Device("cpu")))
    except AttnError as error:  # a kind of call that no backend runs
        return f"is no reproducer: {error}" if "cannot run this" in str(error) else str(error)
    return "is no reproducer: it is one"


@given(at=st.floats(0, 1), junk=st.binary(max_size=40), cut=st.booleans())
def test_broken_bytes(file, tmp_path_factory, at, junk, cut):
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    place = int(at * header)  # the header: what follows are numbers, and any will do
    broken = data[:place] + junk + data[place + len(junk) * (not cut) :]
    path = tmp_path_factory.mktemp("broken") / "file"
    path.write_bytes(broken)
    assert "is no reproducer: " in outcome(path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.floats(), st.just(10**400), st.just([]),
    st.integers(-3, 200), st.just(1 << 40), st.just({}), st.lists(st.integers(-1, 200), max_size=4),
    st.just([[[]]]), st.sampled_from(["cross", "fp8_e4m3", "mla", "HND", "decode", "window"]),
)  # fmt: skip


def paths(data, prefix=()):
    """Every place of a JSON value."""
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield (*prefix, key)
            yield from paths(data[key], (*prefix, key))


@given(pick=st.lists(st.tuples(st.floats(0, 0.999), JUNK), min_size=1, max_size=3))
def test_any_metadata(file, tmp_path_factory, pick):
    data, tensors = parts(file)
    for share, value in pick:
        places = [p for p in paths(data) if p[0] != "about"]
        *where, last = places[int(share * len(places))]
        inner = data
        for key in where:
            inner = inner[key]
        inner[last] = copy.deepcopy(value)
    path = tmp_path_factory.mktemp("data") / "file"
    save_file(tensors, path, metadata={KEY: json.dumps(data)})
    assert "is no reproducer: " in outcome(path)


SHAPES = st.lists(st.integers(0, 5), max_size=4)
DTYPES = st.sampled_from([torch.int32, torch.float32, torch.bool, torch.bfloat16, torch.uint8])


@given(share=st.floats(0, 0.999), shape=SHAPES, dtype=DTYPES, drop=st.booleans())
def test_any_tensors(file, tmp_path_factory, share, shape, dtype, drop):
    data, tensors = parts(file)
    name = sorted(tensors)[int(share * len(tensors))]
    tensors.pop(name)
    if not drop:
        tensors[name] = torch.full(shape, 3).to(dtype)
    path = tmp_path_factory.mktemp("tensors") / "file"
    save_file(tensors, path, metadata={KEY: json.dumps(data)})
    assert "is no reproducer: " in outcome(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_table": -1}, "page_table names pages that are not in the file"),
        ({"page_table": 10**6}, "page_table names pages that are not in the file"),
        ({"seq_lens": [50, 100_000]}, "a request of 100000 tokens is longer than its pages"),
        ({"seq_lens": [50, 3]}, "4 new tokens in a length of 3"),
        ({"query_lens": [4, 5]}, "out.0 is"),
        ({"format": 2}, "its format is 2, this attn-core reads 1"),
        ({"mode": "idle"}, "mode"),
        ({"scales": [{"value": float("nan"), "tensor": False}] * 2}, "scale nan"),
    ],
    ids=str,
)
def test_what_a_kernel_would_trust_is_checked(file, tmp_path, change, said):
    data, tensors = parts(file)
    if "page_table" in change:
        tensors["page_table"][0, 0] = change.pop("page_table")
    data |= change
    save_file(tensors, tmp_path / "file", metadata={KEY: json.dumps(data)})
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "file")
    assert said in str(caught.value)


@pytest.mark.parametrize("command", ["replay", "bisect"])
def test_the_command_says_what_is_wrong(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    for name in ("text", "empty", "weights", "nowhere", "."):
        monkeypatch.setattr(sys, "argv", ["attn", command, str(tmp_path / name)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert end.value.code == 2
        assert "is no reproducer: " in said.err
        assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["replay", "bisect"])
def test_what_is_no_reproducer_is_said_without_torch(command, tmp_path):
    """Importing torch takes seconds, which a mistyped path need not cost."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("nowhere", "config.json"):
        code = f"""
import sys
from attn_core import cli
sys.argv = ["attn", "{command}", {str(tmp_path / name)!r}]
try:
    cli.main()
except SystemExit as end:
    assert end.code == 2, end.code
assert "torch" not in sys.modules
"""
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert "is no reproducer: " in ran.stderr


def test_the_commands_run_a_file(file, tmp_path, monkeypatch, capsys):
    def attn(*arguments):
        monkeypatch.setattr(sys, "argv", ["attn", *arguments])
        monkeypatch.setattr("attn_core.cli.replay.load_plugins", lambda: REGISTRY)
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, capsys.readouterr().out

    code, said = attn("replay", str(file))
    assert code == 1
    assert "target_verify, layer 0: 2 requests, 8 queries over 50, 117 tokens; mha" in said
    code, said = attn("replay", str(file), "--backend", "torch_native,reference", "--json")
    assert code == 0
    found = json.loads(said)["backends"]
    assert found["reference"]["now"]["wrong"] is False
    assert found["lengthy"]["recorded"]["wrong"] is True
    code, said = attn("replay", str(file), "--backend", "triton")
    assert code == 1
    code, said = attn("bisect", str(file), "--out", str(tmp_path / "small"))
    assert code == 0
    assert "1 requests, 1 queries over 101 tokens" in said
    assert load(tmp_path / "small").seq_lens == (101,)
    code, said = attn("bisect", str(tmp_path / "small"), "--out", str(tmp_path / "json"), "--json")
    found = json.loads(said)
    assert (code, found["out"], found["not_needed"]) == (0, str(tmp_path / "json"), [])
    assert found["call"].startswith("extend, layer 0: 1 requests, 1 queries over 101 tokens")
    assert load(tmp_path / "json").seq_lens == (101,)
    monkeypatch.setattr("attn_core.trust.bisect.smallest", None)  # refused before the search
    for place in (file, tmp_path, "/proc/absent/small"):
        assert attn("bisect", str(file), "--out", str(place))[0] == 2


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path):
    """A pipe that nobody writes into would hold the reader forever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is no reproducer: not a file" in outcome(pipe)
    assert "is no reproducer: not a file" in outcome(tmp_path)
    assert "No such file" in outcome(tmp_path / "absent")
