"""The extras of the packages: they hold what was proved, have bounds, and show where they live."""

import pathlib
import re
import tomllib

import pytest
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import load_plugins
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = sorted((ROOT / "packages").iterdir())
WHEELS = (ROOT / "tests/contracts/wheels.txt").read_text().splitlines()
PROVED = dict(line.split("==") for line in WHEELS if line and not line.startswith("#"))
BOUNDS = {"<", "<=", "==", "~="}


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def extras(package):
    """Yield (extra, requirement) of a package."""
    for name, wanted in project(package)["optional-dependencies"].items():
        for text in wanted:
            yield name, Requirement(text)


def test_an_nvidia_extra_holds_the_version_that_was_proved():
    result = list(extras("attn-nvidia"))
    assert {r.name for _, r in result} <= set(PROVED)
    for name, wanted in result:
        assert wanted.specifier.contains(PROVED[wanted.name], prereleases=True), name
        assert {s.operator for s in wanted.specifier} & BOUNDS, f"{name} has no upper bound"


@pytest.mark.parametrize("package", ["attn-nvidia", "attn-rocm"])
def test_an_extra_of_the_packages_name_of_a_backend_serves_it(package):
    """Where an extra is called like a backend, some row of it takes what the extra installs."""
    registry = load_plugins()
    for name, wanted in extras(package):
        if name == "kernels":
            continue
        groups = [g for row in registry.get(name).capabilities for g in row.requires]
        assert wanted.name in {r.name for g in groups for r in alternatives(g)}, name


def test_rocms_kernels_serve_its_default_backend():
    assert {r.name for name, r in extras("attn-rocm") if name == "kernels"} == {
        "amd-aiter",
        "wave-lang",
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_an_index_shows_where_a_package_comes_from(package):
    about = project(package.name)
    assert about["authors"] == [{"name": "The attn-core developers"}]
    assert about["urls"]["Homepage"] == "https://github.com/attn-core/attn-core"
    assert "Typing :: Typed" in about["classifiers"]
    links = re.findall(r"\]\(([^)]+)\)", (package / "README.md").read_text())
    assert [x for x in links if not x.startswith("https://")] == []
    assert all(
        (ROOT / x.split("/main/")[1].partition("#")[0]).exists() for x in links if "/main/" in x
    )


def test_cores_extras_are_extras_of_the_vendors_packages():
    """Where a package lacks an extra, pip installs it without a word more than a warning."""
    result = {name: r for name, r in extras("attn-core") if r.name.startswith("attn-")}
    assert {"nvidia", "rocm", "ascend", "ascend-npu", "intel", "intel-xpu"} == set(result)
    for name, wanted in result.items():
        assert wanted.extras <= set(project(wanted.name)["optional-dependencies"]), name


def test_a_vendors_plain_extra_never_touches_torch():
    """torch-npu breaks `import torch` without its driver; a kernel library is for one torch."""
    for package in ("attn-ascend", "attn-intel"):
        assert [name for name, _ in extras(package) if name == "kernels"] == []
    for package in PACKAGES:
        assert "torch" not in {r.name for _, r in extras(package.name)}
