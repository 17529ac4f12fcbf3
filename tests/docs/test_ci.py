"""The runner file of docs/how-to/ci.md is valid, and every session that it names exists."""

import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("nox")

ROOT = pathlib.Path(__file__).parents[2]
RUNNER = ROOT / "docs" / "examples" / "ci.yml"
PAGE = ROOT / "docs" / "how-to" / "ci.md"
PLATFORMS = {"cpu", "nvidia", "rocm", "ascend", "intel"}
VALUE = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")


@pytest.fixture(scope="module")
def sessions():
    """The names that `nox -l` lists."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-l"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(r"^[*-] (\w+)", listed.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(RUNNER.read_text())["jobs"]


def points(job):
    """List the values that a job's matrix gives to its names, one dict per run of the job."""
    axes = dict(job.get("strategy", {}).get("matrix", {}))
    include = axes.pop("include", [])
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [*(product if axes else []), *include] or [{}]


def commands(job):
    """Yield each command of each run of a job; a name that its matrix lacks is a KeyError."""
    for point, step in itertools.product(points(job), job["steps"]):
        if "run" in step:
            yield VALUE.sub(lambda name, point=point: point[name[1]], step["run"])


def named(job):
    """Return the sessions that a job runs."""
    return {name for c in commands(job) for name in re.findall(r"nox -s (\S+)", c)}


def test_it_is_a_workflow(jobs):
    full = yaml.safe_load(RUNNER.read_text())
    assert {"name", True, "permissions", "jobs"} == set(full), "YAML reads `on` as a truth value"
    assert {"pull_request", "push", "schedule"} == set(full[True])
    for name, job in jobs.items():
        assert job["runs-on"], name
        assert job["timeout-minutes"] > 0, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")), (name, step)
        for point in points(job):
            for value in VALUE.findall(yaml.safe_dump(job)):
                assert value in point, (name, value)


def test_the_sessions_that_it_names_exist(jobs, sessions):
    assert set().union(*(named(job) for job in jobs.values())) <= sessions
    assert sessions >= PLATFORMS


def test_every_platform_is_emulated_and_has_a_device(jobs):
    assert named(jobs["emulated"]) == PLATFORMS
    assert named(jobs["device"]) == PLATFORMS - {"cpu"}, "every machine has a CPU"
    assert any(c.strip() == "python -m nox" for c in commands(jobs["default"]))


def test_what_is_cached_is_where_the_wheels_are(jobs):
    [cache] = [s for s in jobs["emulated"]["steps"] if "cache@" in s.get("uses", "")]
    source = (ROOT / "noxfile.py").read_text()
    assert cache["with"]["path"] == "build/wheels"
    assert 'WHEELS = ROOT / "build" / "wheels"' in source
    [hashed] = re.findall(r"hashFiles\('(.+?)'\)", cache["with"]["key"])
    assert (ROOT / hashed).is_file()


def test_each_wheel_is_downloaded_by_one_platform(monkeypatch):
    spec = importlib.util.spec_from_file_location("noxfile_of_ci", ROOT / "noxfile.py")
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    wheels = {}
    monkeypatch.setattr(file, "check_platform", lambda name, *rest: wheels.update({name: rest}))
    for name in PLATFORMS - {"cpu"}:
        getattr(file, name).func(name)
    prefixes = {name: tuple(arguments[-1].split()) for name, arguments in wheels.items()}
    for pin in file.vendor_pins():
        assert sum(pin.startswith(p) for p in prefixes.values()) == 1, pin
    assert prefixes["ascend"] == ("torch-npu",)


def test_torch_and_nox_are_in_one_python(jobs):
    """The sessions of platforms see the torch of the Python that runs nox."""
    installed = [c for c in commands(jobs["emulated"]) if "pip install" in c]
    assert all("torch nox" in c for c in installed)
    for job in jobs.values():
        assert all(c.startswith("python -m ") for c in commands(job))


def test_the_page_has_every_session(sessions):
    text = PAGE.read_text()
    assert "../examples/ci.yml" in text
    for name in PLATFORMS:
        assert f"| `{name}` |" in text
    assert set(re.findall(r"nox -s (\w+)", text)) <= sessions
