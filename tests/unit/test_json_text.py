"""Deep, huge and broken JSON: every reader says what is wrong in plain words, and none crashes."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import torch
from attn_core import AttnError
from attn_core.costs import store
from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.json_text import MOST_LEVELS, TOO_DEEP, loaded
from attn_core.model_config import read_config, requirements_from_config
from attn_core.plugins.data_files import data_files
from attn_core.selection.lock import Lock
from attn_core.trust import files, header
from hypothesis import given
from hypothesis import strategies as st

DEPTHS = (1, 50, MOST_LEVELS, MOST_LEVELS + 1, 900, 990, 1000, 5000, 100_000)
DEEP = [
    text
    for n in DEPTHS
    for text in (
        "[" * n + "]" * n,
        '{"a":' * n + "1" + "}" * n,
        '[{"layer_types":' * n + "0" + "}]" * n,
        "[" * n,
    )
]
DIGITS = "9" * 5000
WRAPPED = (
    "%s",
    '{"prompts": %s}',
    '{"schema": 1, "decision": {"prefill": %s}}',
    '{"model_type": "llama", "layer_types": %s}',
    '{"model_type": "llama", "rope_scaling": {"x": %s}}',
)


def safe(data, path, name):
    from safetensors.torch import save_file

    save_file({"q": torch.zeros(1)}, path / name, metadata={"_": ""} | {header.KEY: data})
    return path / name


def readers(path):
    """Yield each reader of JSON as a function of its text."""

    def file(read):
        def call(text):
            place = path / "x.json"
            place.write_text(text)
            return read(place)

        return call

    yield Workload.parse
    yield file(lambda p: store.parsed(p, "lock", Lock.from_json))
    yield file(lambda p: store.parsed(p, "profile", Profile.from_json))
    yield file(lambda p: requirements_from_config(read_config(p)))
    yield lambda text: files.load(safe(text, path, "x.safetensors"))


PYTHONS = ("recursion", "Recursion", "int_max_str_digits", "Exceeds", "char ", "Error:", "codec")


def refused(read, text):
    try:
        read(text)
    except AttnError as error:
        said = str(error)
        assert not any(word in said for word in PYTHONS), said[:500]
        assert len(said) < 1500
        return said
    return None


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_every_reader_answers_in_plain_words(tmp_path, wrapped):
    for read in readers(tmp_path):
        for inner in (*DEEP, DIGITS, f"[{DIGITS}]", '"', "{,}", "", "\\ud800", "NaN"):
            refused(read, wrapped % inner)


def test_what_is_said(tmp_path):
    for read in readers(tmp_path):
        assert TOO_DEEP in refused(read, "[" * 100_000)
        assert "too many digits" in refused(read, f'{{"a": {DIGITS}}}')
        assert "it is no JSON: line 2, column 3: " in refused(read, "[1,\n  x]")


def test_the_limit_is_the_same_at_any_depth_of_the_caller():
    fits, deep = (json.loads("[" * n + "]" * n) for n in (MOST_LEVELS, MOST_LEVELS + 1))

    def below(frames):
        if frames:
            return below(frames - 1)
        assert loaded(json.dumps(fits)) == fits
        with pytest.raises(UsageError, match="nested too deeply"):
            loaded(json.dumps(deep))
        return None

    for frames in (0, sys.getrecursionlimit() // 3):
        below(frames)


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_text_is_data_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        json.dumps(loaded(text))


def test_a_plugins_file_is_named_with_what_is_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "odd_json_plugin" / "evidence"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    for name, text in (("a", "[" * 9000), ("b", DIGITS), ("c", "{"), ("d", "{}")):
        (folder / f"{name}.json").write_text(text)
    (folder / "e.json").write_bytes(b"\xff\xfe\x00")
    (folder / "f.json").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = {p.stem: x for p, x in data_files("odd_json_plugin:x", "evidence", lambda data: None)}
    assert found["a"] == TOO_DEEP
    assert found["b"] == "a number in it has too many digits"
    assert found["c"].startswith("it is no JSON: line 1, column 2")
    assert found["d"] == {}
    assert found["e"].startswith("it is no JSON")
    assert found["f"] == "Is a directory"


def test_a_byte_order_mark_is_no_fault():
    """Editors on Windows put one in front; bytes and text are read alike."""
    assert loaded('\ufeff{"a": 1}') == loaded('\ufeff{"a": 1}'.encode()) == {"a": 1}
