"""Emulated runs leave evidence of their own level, beside what a device has shown."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import attn_ascend
import attn_intel
import attn_nvidia
import attn_rocm
import pytest
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.evidence import write_evidence
from attn_core.testing.runner import CellReport
from attn_core.tools.matrix import build_matrix

SUITE = '''
"""A suite in the place of an emulated one."""
import pytest
from attn_core.testing import BackendSuite

class TestLatent(BackendSuite):
    name, device, on, libraries = "torch_native", "cpu:avx2", "cpu", {}
    kinds, passes, reduced = ("mla",), 2, True

    @pytest.fixture(autouse=True)
    def prepared(self, monkeypatch):
        """Suites may need one; FAULT"""

class TestOther(TestLatent):
    name = "flex_attention"
    kinds = ("mha",)

def test_of_another_kind():
    raise AssertionError("not asked")
'''


@pytest.fixture(scope="module")
def evidence():
    spec = importlib.util.spec_from_file_location(
        "emulators_evidence", pathlib.Path(__file__).parent / "evidence.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(**more) -> CellReport:
    kwargs = {"declared": True, "cases": 3, "failed": 0, "worst": 0.1, "budget": 0.2, "skipped": {}}
    return CellReport(**(kwargs | more))


def test_a_suite_leaves_one_file_per_kind(evidence, tmp_path):
    (tmp_path / "test_a.py").write_text(SUITE)
    assert evidence.main(["torch_native", "--out", str(tmp_path / "out")], tests=tmp_path) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "torch_native-mla-cpu-avx2.emulated.json"
    written = json.loads(file.read_text())
    assert {"page_sizes", "fp8_kv", "spec_topk_gt1"} <= set(written["cells"])
    assert {c["level"] for c in written["cells"].values()} == {"emulated"}
    assert all(0 < c["worst"] <= c["budget"] for c in written["cells"].values())


def test_what_fails_is_no_evidence(evidence, tmp_path, capsys):
    place = "attn_core.backends.torch_native.backend.TorchNative.forward"
    wrong = f'"""; monkeypatch.setattr("{place}", None)'
    (tmp_path / "test_broken.py").write_text(SUITE.replace('FAULT"""', wrong))
    assert evidence.main(["torch_native", "--out", str(tmp_path)], tests=tmp_path) == 1
    written = json.loads((tmp_path / "torch_native-mla-cpu-avx2.emulated.json").read_text())
    assert not {"page_sizes", "fp8_kv", "spec_topk_gt1"} & set(written["cells"])
    assert "torch_native on cpu:avx2: mla, page_sizes:" in capsys.readouterr().err


def test_a_name_without_a_suite_is_said(evidence, tmp_path, capsys):
    (tmp_path / "test_none.py").write_text("def test_nothing(): ...")
    assert evidence.main(["fa3", "--out", str(tmp_path / "out")], tests=tmp_path) == 1
    assert "no suite of fa3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_levels_never_overwrite_each_other(tmp_path, monkeypatch):
    spec, registry = load_plugins().get("fa3"), load_plugins()
    package = tmp_path / "attn_nvidia"
    package.mkdir()
    (package / "__init__.py").write_text("")
    device = parse_device("cuda:sm90")
    seen = {"mha": {"page_sizes": cell(), "sinks": cell(problem="wrong")}}
    proved = {"mha": {"page_sizes": cell(), "lse": cell()}}
    for level, cells in (("device-tested", seen), ("emulated", proved), ("compiled", proved)):
        write_evidence(package / "evidence", spec, device, cells, level=level)
    assert sorted(p.name for p in (package / "evidence").iterdir()) == [
        "fa3-mha-cuda-sm90.compiled.json",
        "fa3-mha-cuda-sm90.emulated.json",
        "fa3-mha-cuda-sm90.json",
    ]
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, real=importlib.util.find_spec: (
            importlib.util.spec_from_file_location(
                name, package / "__init__.py", submodule_search_locations=[str(package)]
            )
            if name == "attn_nvidia"
            else real(name)
        ),
    )
    shown = build_matrix(registry)["mha"]["fa3"]["evidence"]
    assert shown["page_sizes"] == "device-tested"
    assert shown["lse"] == "compiled"
    assert shown["sinks"] == "declared", "a cell that failed is no evidence"


@pytest.mark.parametrize(
    "package", [attn_ascend, attn_intel, attn_nvidia, attn_rocm], ids=lambda p: p.__name__
)
def test_the_matrix_shows_the_files_of_the_package(package):
    """What lies in a package's folder is what the matrix says, cell by cell."""
    folder = pathlib.Path(package.__file__).parent / "evidence"
    assert [*folder.glob("*.json")]
    matrix = build_matrix(load_plugins())
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        shown = matrix[data["kind"]][data["backend"]]["evidence"]
        order = ("declared", "emulated", "compiled", "device-tested")
        for name, proof in data["cells"].items():
            assert order.index(shown[name]) >= order.index(proof["level"]), (path.name, name)
        levels = {proof["level"] for proof in data["cells"].values()}
        suffix = path.name.removesuffix(".json").rpartition(".")[2]
        assert levels <= ({suffix} if suffix in order else {"device-tested"}), path.name
