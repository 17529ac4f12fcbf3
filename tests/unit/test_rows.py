"""The rows against the documented matrix, both ways."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from attn_core.cli.backends import backends_command
from attn_core.errors import BackendNotImplementedError
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import NoBackendError, notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.capabilities import ANY_TOPK
from attn_core.spec.device import ARCHS, parse_device
from attn_core.spec.kinds import LINEAR_KINDS, Phase
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.tools.matrix import build_matrix

REGISTRY = load_plugins()
MATRIX = build_matrix(REGISTRY)
DOCUMENTED = tomllib.loads((Path(__file__).parents[1] / "data/documented_matrix.toml").read_text())
ROWS = [(spec, row) for spec in REGISTRY.backends.values() for row in spec.capabilities]
NAMES = {
    "torch_native",
    "flex_attention",
    "triton",
    "flashinfer",
    "fa3",
    "fa4",
    "trtllm_mha",
    "trtllm_mla",
    "cutlass_mla",
    "flashmla",
    "dual_chunk_flash_attn",
    "nsa",
    "aiter",
    "wave",
    "ascend",
    "intel_xpu",
    "intel_amx",
    "ipex",
}
CELLS = {
    "mha": "devices page_sizes fp8_kv fp4_kv spec_topk1 spec_topk_gt1 sliding_window multimodal",
    "mla": "page_sizes fp8_kv fp4_kv chunked_prefix_cache spec_topk1 spec_topk_gt1",
}
SOFTMAX = [
    pytest.param(kind, row, cell, id=f"{kind}-{row['backend']}-{cell}")
    for kind, cells in CELLS.items()
    for row in DOCUMENTED[kind]
    for cell in cells.split()
]


def where(row):
    return [f"{row.device}:{a}" for a in sorted(row.archs)] or [row.device]


@pytest.mark.parametrize(("kind", "row", "cell"), SOFTMAX)
def test_a_documented_cell_holds_or_its_departure_says_why(kind, row, cell):
    ours = MATRIX[kind][row["backend"]]
    documented = row["platform"] if cell == "devices" else row[cell]
    if cell == "devices":
        have = "any" if "any" in ours[cell] else "/".join(ours[cell])
    else:
        have = ours[cell]
    assert (have != documented) == (cell in ours["matrix_deviations"]), (have, documented)


def test_a_documented_yes_is_the_floor():
    below = {
        f"{kind}.{row['backend']}.{cell}"
        for kind, cells in CELLS.items()
        for row in DOCUMENTED[kind]
        for cell in cells.split()
        if row.get(cell) is True and MATRIX[kind][row["backend"]][cell] is not True
    }
    assert below == set()


@pytest.mark.parametrize("row", DOCUMENTED["gdn"], ids=lambda r: r["backend"])
def test_documented_gdn_kernels(row):
    name, _, device = row["backend"].partition("_")
    spec = REGISTRY.get(name, "linear")
    rows = [r for r in spec.capabilities if r.kind == "gdn" and r.device == (device or "cuda")]
    assert rows
    assert row["decode"] == any(Phase.DECODE in r.phases for r in rows)
    assert row["prefill"] == any(Phase.PREFILL in r.phases for r in rows)
    assert row["target_verify"] == any(r.max_verify_topk >= 1 for r in rows)


def test_the_names_are_the_documented_ones():
    assert {spec.name for spec in REGISTRY.family("softmax")} == NAMES
    assert {spec.name for spec in REGISTRY.family("linear")} == {
        "triton",
        "cutedsl",
        "torch_native",  # undocumented: the reference
        "flashinfer",  # undocumented in the matrix, taken by the documented flag
    }


def test_departures_name_cells_that_are_there():
    for spec in REGISTRY.backends.values():
        for place, why in spec.matrix_deviations.items():
            kind, _, cell = place.partition(".")
            documented = {r["backend"] for r in DOCUMENTED[kind]}
            if cell == "backend":  # a whole row that the documented matrix lacks
                assert spec.name not in documented
            else:
                assert cell in CELLS[kind].split()
            assert len(why) > 30
    for kind in CELLS:
        undocumented = set(MATRIX[kind]) - {r["backend"] for r in DOCUMENTED[kind]}
        assert all(f"{kind}.backend" in REGISTRY.get(n).matrix_deviations for n in undocumented)


@pytest.mark.parametrize(("spec", "row"), ROWS, ids=lambda x: getattr(x, "name", ""))
def test_a_row_is_well_formed(spec, row):
    assert row.device in ARCHS or row.device == "any"
    assert row.archs <= set(ARCHS.get(row.device, ())), where(row)
    assert row.dtypes <= {"fp32", "fp16", "bf16"}
    assert row.kv_dtypes <= {"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"}
    assert row.max_verify_topk in (0, 1, ANY_TOPK)
    assert row.layouts <= {"NHD", "HND"}
    if row.preferred_page_size:
        assert row.preferred_page_size in row.page_sizes
        assert row.preferred_page_reason
    if row.max_session_topk is not None:
        assert row.max_verify_topk <= row.max_session_topk
    if row.bans:
        assert set(row.bans) <= NAMES
        assert all(row.bans.values())
    if row.kind in ("mla", "dsa") and row.head_dims:
        assert (576, 512) in row.head_dim_pairs
    if Phase.ENCODE in row.phases:
        assert row.encoder
        assert row.phases == {Phase.ENCODE}, "encoders rank on their own"
        assert not row.page_sizes
    if row.kind in LINEAR_KINDS and row.device != "npu":  # whose operators take bf16 alone
        assert "fp32" in row.kv_dtypes


def test_no_row_is_declared_without_a_class_that_runs_it():
    """Third parties may declare what they plan; of what comes with attn-core all is there."""
    assert [(spec.name, where(row)) for spec, row in ROWS if spec.creator(row) is None] == []
    for kind, backends in MATRIX.items():
        assert {name for name, cells in backends.items() if not cells["implemented"]} == set(), kind


def test_what_is_built():
    built = {key for key, spec in REGISTRY.backends.items() if spec.implemented}
    core = {"torch_native", "flex_attention", "triton"}
    nvidia = {"flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla", "cutlass_mla", "flashmla"}
    nvidia |= {"dual_chunk_flash_attn", "nsa"}
    rocm = {"aiter", "wave"}
    ascend = {"ascend"}
    intel = {"intel_xpu", "intel_amx", "ipex"}
    linear = {("linear", name) for name in ("torch_native", "triton", "flashinfer", "cutedsl")}
    softmax = core | nvidia | rocm | ascend | intel
    assert built == {("softmax", name) for name in softmax} | linear


@pytest.mark.parametrize("here", [True, False], ids=["here", "simulated"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("arch", ARCHS["cpu"])
def test_a_cpu_never_gets_triton(arch, kind, here):
    """Its kernels run there in an interpreter, for tests; no row says so."""
    needs, place = Requirements(layers=(LayerRequirements(kind=kind),)), parse_device(f"cpu:{arch}")
    libraries = {"triton": None}
    chosen = select(needs, place, REGISTRY, libraries, simulated=not here)
    assert "triton" not in (chosen.backend("prefill"), chosen.backend("decode"))
    named = Overrides(attention_backend="triton")
    with pytest.raises(NoBackendError, match=rf"device cpu:{arch} \(supports cuda"):
        select(needs, place, REGISTRY, libraries, named, simulated=not here)


@pytest.mark.parametrize(
    ("place", "found", "why"),
    [
        ("cpu:avx2", "3.7.1", "for cuda, rocm"),
        ("npu:910b", "3.7.1", "for cuda, rocm"),
        ("cuda:sm90", "3.3.0", "needs triton>=3.4"),
        ("cuda:sm90", "3.7.1", "usable"),
        ("rocm:gfx942", None, "needs triton>=3.4 or pytorch-triton-rocm>=3.4"),
    ],
)
def test_attn_backends_says_why_triton_is_not_usable(place, found, why, monkeypatch, capsys):
    monkeypatch.setattr("attn_core.cli.backends.probe_device", lambda: parse_device(place))
    libraries = {"triton": found} if found else {}
    monkeypatch.setattr(Registry, "installed_libraries", lambda self: libraries)
    backends_command(json=True)
    listed = json.loads(capsys.readouterr().out)["backends"]
    [entry] = [e for e in listed if (e["family"], e["name"]) == ("softmax", "triton")]
    assert (entry["here"], entry["usable"]) == (why, why == "usable")


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm86"])
def test_triton_reads_no_e4m3_below_sm89(arch):
    """Nor the e4m3 block scales of FP4. Kernels of sparse MLA read e4m3 by its bits, there too."""
    rows = [r for r in REGISTRY.get("triton").capabilities if arch in r.archs]
    stores = frozenset().union(*(r.kv_dtypes for r in rows if r.kind != "dsa"))
    assert "fp8_e5m2" in stores
    assert not {"fp8_e4m3", "fp4_e2m1"} & stores
    sparse = [r for r in rows if r.kind == "dsa"]
    assert all("fp8_e4m3" in r.kv_dtypes for r in sparse)
    assert bool(sparse) == (arch != "sm75")


def test_triton_has_no_latent_attention_on_turing():
    needs = Requirements(layers=(LayerRequirements(kind="mla"),))
    named, libraries = Overrides(attention_backend="triton"), {"triton": None}
    with pytest.raises(NoBackendError, match=r"device cuda:sm75 \(supports cuda:sm80"):
        select(needs, parse_device("cuda:sm75"), REGISTRY, libraries, named, simulated=True)
    chosen = select(needs, parse_device("cuda:sm80"), REGISTRY, libraries, named, simulated=True)
    assert chosen.backend("decode") == "triton"


@pytest.mark.parametrize(
    ("device", "most"), [("cuda:sm75", 256), ("cuda:sm90", 512), ("rocm:gfx942", 512)]
)
def test_triton_refuses_head_dims_that_do_not_fit_shared_memory(device, most):
    def selected(dim, v_dim=None):
        needs = Requirements(layers=(LayerRequirements(head_dim=dim, v_head_dim=v_dim),))
        named = Overrides(attention_backend="triton")
        libraries = {"triton": None}
        return select(needs, parse_device(device), REGISTRY, libraries, named, simulated=True)

    assert selected(most).backend("prefill") == "triton"
    with pytest.raises(NoBackendError, match=rf"head_dim {most + 1} \(supports 1, 2 … {most}\)"):
        selected(most + 1)
    for pair in ((most + 1, 64), (64, most + 1)):
        assert selected(*(min(most, x) for x in pair)).backend("decode") == "triton"
        with pytest.raises(NoBackendError, match=rf"head_dim {pair[0]}/{pair[1]} \(supports 1, 2"):
            selected(*pair)


def test_creating_a_declared_backend_says_so():
    import torch
    from attn_core.runtime.backend import BackendConfig, create_backend

    for (family, _), spec in REGISTRY.backends.items():
        if spec.implemented:
            continue
        config = BackendConfig(
            name=spec.name,
            row=spec.capabilities[0],
            layers=(),
            page_size=1,
            dtype="bf16",
            kv_cache_dtype="bf16",
            device=torch.device("cpu"),
        )
        with pytest.raises(BackendNotImplementedError, match=f"{spec.name} is declared"):
            create_backend(spec, config, family)


def test_every_vision_name_of_the_documentation_is_known():
    names = "sdpa fa3 fa4 triton_attn ascend_attn aiter_attn flashinfer_cudnn amx_attn xpu_attn"
    for name in names.split():
        spec = REGISTRY.get(name)
        assert any(Phase.ENCODE in row.phases for row in spec.capabilities)


def test_beside_gdn_on_blackwell_and_ascend_only_the_documented_ones_fit():
    free = {"cuda": {"triton", "trtllm_mha", "fa4"}, "npu": {"ascend"}}
    for device, archs in (("cuda", ("sm100", "sm103", "sm110")), ("npu", ("910b", "910c"))):
        for arch in archs:
            fits = {
                spec.name
                for spec, row in ROWS
                if row.kind == "mha"
                and row.device in (device, "any")
                and (not row.archs or arch in row.archs)
                and Phase.ENCODE not in row.phases
                and row.with_linear_layers is not False
            }
            assert fits == free[device], arch


@pytest.mark.parametrize(
    "device", ["cuda:sm75", "cuda:sm120", "rocm:gfx942", "xpu:pvc", "cpu:neon"]
)
@pytest.mark.parametrize(
    "model", [("mha", "gdn"), ("mla", "kda"), ("mha",), ("mla",)], ids="+".join
)
@pytest.mark.parametrize("name", ["torch_native", "flex_attention"])
def test_the_portable_ones_stand_beside_linear_layers_where_that_is_free(name, model, device):
    """Every place but data-centre Blackwell and Ascend, which the golden table refuses."""
    needs = Requirements(layers=tuple(LayerRequirements(kind=k) for k in model))
    place, named = parse_device(device), Overrides(attention_backend=name)
    libraries = {"triton": None}
    if (name, model[0]) == ("flex_attention", "mla"):
        with pytest.raises(NoBackendError, match=r"kind mla \(supports mha\)"):
            select(needs, place, REGISTRY, libraries, named, simulated=True)
        return
    chosen = select(needs, place, REGISTRY, libraries, named, simulated=True)
    assert chosen.backend("prefill") == chosen.backend("decode") == name
    assert (
        chosen.roles["prefill"].row.priority
        == {
            "flex_attention": 5,
            "torch_native": 20 if place.type == "cpu" else 0,
        }[name]
    )


def test_requirements_are_extras_of_their_package():
    """What a row requires can be installed by an extra, or is named in the package's README."""
    bundled = {"pytorch-triton-rocm", "torch-npu"}  # with the platform's own torch
    root = Path(__file__).parents[2] / "packages"
    for key, spec in REGISTRY.backends.items():
        package = root / REGISTRY.origins[key].distribution
        text = (package / "pyproject.toml").read_text() + (package / "README.md").read_text()
        for row in spec.capabilities:
            for part in " or ".join(row.requires).split(" or "):
                name = re.split(r"[<>=~! ]", part)[0]
                assert name in text or name in bundled, (
                    f"{spec.name}: {name} is in no extra of {package.name}"
                )


def test_a_note_of_decode_is_printed_once():
    chosen = select(
        Requirements(),
        parse_device("cuda:sm90"),
        REGISTRY,
        {"flash-attn-4": None},
        Overrides(attention_backend="fa4"),
        simulated=True,
    )
    assert notes_of(chosen).count("split-KV") == 1
    assert "fa4 (decode): FA4 decode on Hopper" in notes_of(chosen)


def test_no_pip_line_for_what_no_index_has():
    lines = {p.distribution: p.pip for p in REGISTRY.pins}
    assert lines["flash-attn-3"] == lines["attn-intel-kernels"] == ""
    assert lines["triton-ascend"] == "pip install 'triton-ascend>=3.2'"
    (ascend,) = [p for p in REGISTRY.pins if p.distribution == "triton-ascend"]
    assert "owns the module `triton`" in ascend.why


def test_rows_import_no_torch():
    code = "import sys, attn_core.backends, attn_nvidia, attn_nvidia.dsa, attn_rocm, attn_ascend"
    code += ", attn_intel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
