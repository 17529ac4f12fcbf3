"""The matrix is read off the rows; evidence files raise a cell's level, never a cell's value."""

from __future__ import annotations

import json

import pytest
import strategies as gen
from attn_core.cli.backends import matrix_command
from attn_core.plugins.registry import load_plugins
from attn_core.selection.diagnosis import why_not
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.tools.doctor import examine
from attn_core.tools.matrix import build_matrix, summary, table, to_html, to_markdown

BASE = {"kind": "mha", "device": "cuda", "dtypes": {"bf16"}, "priority": 1}
ROWS = [
    Capabilities(
        **BASE, kv_dtypes={"bf16"}, page_sizes={64}, sliding_window=True, max_verify_topk=1
    ),
    Capabilities(**BASE, kv_dtypes={"fp8_e4m3"}, page_sizes={16}),
    Capabilities(**BASE, kv_dtypes={"bf16"}, phases={Phase.ENCODE}),
]


def registry(module="nowhere", **kw):
    spec = BackendSpec(name="acme", capabilities=ROWS, create="a:b", **kw)
    point = gen.point("attn-acme", [spec])
    point.value = module
    return load_plugins([point])


def test_a_cell_is_true_if_any_row_has_it():
    cells = build_matrix(registry())["mha"]["acme"]
    assert cells["page_sizes"] == [16, 64]
    assert {c for c, v in cells.items() if v is True} == {
        "fp8_kv",
        "spec_topk1",
        "sliding_window",
        "multimodal",
        "implemented",
    }
    assert set(cells["evidence"].values()) == {"declared"}


def test_platforms_of_linear_layers_have_a_line_each(tmp_path, monkeypatch):
    package = tmp_path / "attn_linear"
    (package / "evidence").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    proof = {"cells": {"decode": {"level": "device-tested"}}, "device": "cuda:sm90"}
    path = package / "evidence" / "acme-gdn-cuda-sm90.json"
    path.write_text(json.dumps({"backend": "acme", "kind": "gdn", **proof}))
    base = {**BASE, "kind": "gdn", "kv_dtypes": {"fp32"}}
    rows = [
        Capabilities(**base, max_verify_topk=1),
        Capabilities(**{**base, "device": "npu"}),
    ]
    spec = BackendSpec(name="acme", capabilities=rows, create="a:b")
    point = gen.point("attn-linear", [spec])
    point.value = "attn_linear"
    lines = build_matrix(load_plugins([point]))["gdn"]
    assert {name: x["target_verify"] for name, x in lines.items()} == {
        "acme (cuda)": True,
        "acme (npu)": False,
    }
    assert [x["evidence"]["decode"] for x in lines.values()] == ["device-tested", "declared"]
    spec = BackendSpec(name="acme", capabilities=rows[:1], create="a:b")
    assert list(build_matrix(load_plugins([gen.point("attn-linear", [spec])]))["gdn"]) == ["acme"]


def test_evidence_files_of_the_package_raise_the_level(tmp_path, monkeypatch):
    package = tmp_path / "attn_proved"
    (package / "evidence").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for i, level in enumerate(("emulated", "device-tested", "compiled")):
        cells = {"fp8_kv": {"level": level}} | ({"lse": {"level": level}} if i == 0 else {})
        file = {"backend": "acme", "kind": "mha", "cells": cells}
        (package / "evidence" / f"{i}.json").write_text(json.dumps(file))
    other = {"backend": "other", "kind": "mha", "cells": {"sinks": {"level": "compiled"}}}
    (package / "evidence" / "other.json").write_text(json.dumps(other))
    monkeypatch.syspath_prepend(str(tmp_path))
    evidence = build_matrix(registry("attn_proved"))["mha"]["acme"]["evidence"]
    assert evidence["fp8_kv"] == "device-tested"
    assert evidence["lse"] == "emulated"
    assert evidence["sinks"] == "declared"


def test_why_not_says_how_far_a_backend_was_proved_on_the_device(tmp_path, monkeypatch):
    folder = tmp_path / "attn_built" / "evidence"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    cells = {"sm80": ("lse", "sinks"), "sm90": ("lse",)}
    for level, arch in (("compiled", "sm80"), ("device-tested", "sm90"), ("emulated", "sm80")):
        proofs = {cell: {"level": level} for cell in cells[arch]}
        proofs |= {"fp8_kv": {"level": level}} if level == "emulated" else {}
        file = {"backend": "acme", "kind": "mha", "device": f"cuda:{arch}", "cells": proofs}
        (folder / f"{arch}.{level}.json").write_text(json.dumps(file))
    monkeypatch.syspath_prepend(str(tmp_path))
    needs, found = Requirements(layers=(LayerRequirements(kind="mha"),)), registry("attn_built")

    def notes(arch):
        return why_not("acme", needs, Device("cuda", arch), found, {}, simulated=True).notes

    assert notes("sm80") == ("mha on cuda:sm80: 2 cells compiled, 1 cell emulated",)
    assert notes("sm90") == ("mha on cuda:sm90: 1 cell device-tested",)
    assert notes("sm100") == ("mha on cuda:sm100: declared, nothing is proved",)
    shown = build_matrix(found)["mha"]["acme"]["evidence"]
    assert (shown["lse"], shown["sinks"]) == ("device-tested", "compiled")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "it is no JSON"),
        ("[]", "a JSON list, not an object"),
        ('{"backend": "acme", "kind": "mha"}', "cells is None (expected a dict)"),
        (
            '{"backend": "acme", "kind": "mha", "cells": {"lse": {"level": "seen"}}}',
            "cell lse has level 'seen' (expected declared, emulated, compiled, device-tested)",
        ),
        ('{"backend": "acme", "kind": "mha", "cells": {"lse": 1}}', "cell lse has level None"),
    ],
)
def test_a_corrupt_evidence_file_is_skipped_and_named(tmp_path, monkeypatch, capsys, text, fault):
    folder = tmp_path / "attn_corrupt" / "evidence"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    cells = {"fp8_kv": {"level": "compiled"}}
    good = {"backend": "acme", "kind": "mha", "cells": cells}
    (folder / "good.json").write_text(json.dumps(good))
    (folder / "bad.json").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = registry("attn_corrupt.rows:plugin")  # an entry point may name an attribute
    monkeypatch.setattr("attn_core.cli.backends.load_plugins", lambda: found)
    matrix_command(kind="mha", format="json")
    out, err = capsys.readouterr()
    assert json.loads(out)["mha"]["acme"]["evidence"]["fp8_kv"] == "compiled"
    assert err.startswith(f"warning: evidence file {folder / 'bad.json'} is skipped: ")
    assert fault in err
    (finding,) = [f for f in examine(found) if f.subject == "evidence"]
    assert finding.level == "problem"
    assert fault in finding.verdict


def test_departures_are_marked_and_explained():
    matrix = build_matrix(
        registry(matrix_deviations={"mha.fp8_kv": "scales work <here>", "mla.fp8_kv": "elsewhere"})
    )
    assert matrix["mha"]["acme"]["matrix_deviations"] == {"fp8_kv": "scales work <here>"}
    assert "scales work" not in to_markdown(matrix, notes=False)
    assert "acme, fp8_kv: scales work <here>" in to_markdown(matrix)
    assert "yes*" in table(matrix, "mha")[1][0]
    assert "fp8_kv*" in summary(matrix, "mha")[1][0][3]
    assert "<td>yes*</td>" in to_html(matrix)
