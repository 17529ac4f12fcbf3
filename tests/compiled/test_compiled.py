"""Each launch compiles for chips that are not here, fits their shared memory and spills nothing."""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import build_kernels
import launch_sites
from launch_sites import SHARED

BUILD = pathlib.Path(__file__).parents[1] / "support" / "build_kernels.py"
# Of kernels whose warps are specialised the assembler counts registers as at the launch, before
# setmaxnreg hands them over: some addresses spill, no tile does. Most are those of checkpoints.
SPILLS = {"decode_mla_hopper": 48, "scan_hopper": 74}
SPILLS |= {("sm90", "mla-decode-shared", "decode_mla_hopper"): 70}  # two loads in a block's loop
# With 128 registers a thread four programs share a multiprocessor.
# What prepares ahead calls a function in a loop, since inlined its addresses spill 170 times; in a
# called function the assembler lets no two products overlap.
SERIALIZED = {"prepare_gdn_ahead"}
SPILLS |= {"prepare_gdn_hopper": 24, "prepare_gdn_ahead": 36, "scan_alone": 6}
# One value is loaded again for each 32 channels, and two are after the last of them.
SPILLS |= {"prepare_kda_hopper": 6}
# Of three parts that share 504 registers, a few addresses and predicates spill.
SPILLS |= {"fused_gdn_hopper": 16}
# Without wgmma the operands of prefill's 64 by 64 products are registers: a few do not fit.
SPILLS |= {("sm80", "prepare_gdn"): 34, ("sm80", "prepare_kda"): 6}
SPILLS |= {("sm89", "prepare_gdn"): 28, ("sm89", "prepare_kda"): 18, ("sm89", "index_scores"): 4}
SPILLS |= {("sm120", "prepare_gdn"): 2, ("sm120", "prepare_kda"): 13, ("sm100", "prepare_kda"): 6}
SPILLS |= {("sm100", "scan_chunks"): 2}  # of keys of 64 channels
# Addresses of checkpoints, and of the three tiles of keys and queries that KDA prepares.
SPILLS |= {("sm90", "scan_chunks"): 26}
SPILLS |= {("sm120", "select_topk"): 8}  # 16 warps of a row have at most 128 registers a thread
# Faster than in half as many keys a step, which spill nothing: a third, with 16 heads a sixth.
SPILLS |= {("sm90", "mla-decode-fp8", "decode_splits"): 24}
SPILLS |= {("sm90", "mla-decode-16-heads-fp8", "decode_splits"): 4}
# Numbers of an item and what the warps are handed, none of them in the loop over blocks.
SPILLS |= {"decode_hopper": 6, ("sm90", "verify-shared", "decode_hopper"): 10}
SPILLS |= {("sm90", "verify-shared-56-rows", "decode_hopper"): 8}
# What differs from pass to pass: no kernel may be compiled anew for it.
SIZES = {"batch", "drafts", "heads_at_once", "programs", "table_stride", "window"}


FIRST_GLUON = "ATTN_FIRST_GLUON"  # where the first Triton lies that has Gluon for Hopper


def build(arch, *names, triton=None):
    """Compile sites, with another Triton than the installed one where a folder of one is given."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton:
        env["PYTHONPATH"] = triton
    done = subprocess.run(
        [sys.executable, BUILD, arch, *names], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(arch, site, *, hot):
    """Say what is wrong with a site."""
    if "error" in site:
        yield f"{site['site']}: {site['error']}"
    elif "not_declared" not in site and not site["kernels"]:
        yield f"{site['site']} launches nothing"
    for kernel in site["kernels"]:
        name, used, room = (
            f"{site['site']}: {kernel['name']}",
            kernel["shared"],
            SHARED[arch] * 1024,
        )
        if SIZES & {*kernel["specialised"]}:
            yield f"{name} is compiled for sizes of a pass: {kernel['specialised']}"
        if used > room:
            yield f"{name} takes {used} bytes of shared memory, {arch} has {room}"
        kinds = ((arch, site["site"], kernel["name"]), (arch, kernel["name"]), kernel["name"])
        allowed = next((SPILLS[x] for x in kinds if x in SPILLS), 0)
        if hot and kernel["spills"] > allowed:
            yield f"{name} spills {kernel['spills']} times, with {kernel['registers']} registers"
        if hot and kernel["serialized"] and kernel["name"] not in SERIALIZED:
            yield f"{name} waits for each product before the next one begins"
        for write in kernel["overwritten"]:
            yield f"{name} overwrites what may still be read:\n{write}"


def judged(arch, *names, hot):
    """Compile sites and add to each what is wrong with it."""
    return [site | {"faults": list(faults(arch, site, hot=hot))} for site in build(arch, *names)]


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED)
def test_hot_launches(arch):
    sites = judged(arch, "quick", hot=True)
    assert len(sites) == 5
    assert [fault for site in sites for fault in site["faults"]] == []
    kernels = {site["site"]: {k["name"] for k in site["kernels"]} for site in sites}
    declared = [site["site"] for site in sites if "not_declared" not in site]
    assert ("mla-decode" in declared) == (arch != "sm75")
    cut = [name for name in declared if "decode" in name]
    assert all("merge_splits" in kernels[name] for name in cut), "a request is cut"


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED)
def test_every_launch(arch, evidence):
    result = judged(arch, "hot", hot=True) + judged(arch, "more", hot=False)
    evidence(launch_sites.chip(arch), result)
    linear = judged(arch, "linear", hot=True)
    evidence(launch_sites.chip(arch, "linear"), linear)
    result += linear
    assert len(result) == len(launch_sites.SITES) - 1  # without "greedy"
    assert [fault for site in result for fault in site["faults"]] == []


@pytest.mark.long
@pytest.mark.skipif(FIRST_GLUON not in os.environ, reason="nox -s compiled installs that Triton")
def test_kernels_of_hopper_compile_with_the_first_triton_that_has_gluon():
    """It takes less than later ones: its functions return no constants."""
    names = ("decode", "extend", "verify-tree", "mla-decode", "dsa-decode", "score-prompts")
    names += ("decode-shared", "verify-shared", "verify-shared-56-rows", "linear")
    folder = os.environ[FIRST_GLUON]
    assert pathlib.Path(folder, "triton-3.6.0.dist-info").is_dir()
    sites = build("sm90", *names, triton=folder)
    assert [fault for site in sites for fault in faults("sm90", site, hot=False)] == []
    kernels = {kernel["name"] for site in sites for kernel in site["kernels"]}
    own = {"decode_hopper", "extend_hopper", "decode_mla_hopper", "score_prompts_hopper"}
    assert own | {"prepare_gdn_hopper", "scan_hopper", "fused_gdn_hopper"} <= kernels


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "of_prompts", "of_steps"),
    [
        ("sm100", "tcgen05.mma", "mma.sync.aligned.m16n8k16"),
        ("sm120", "mma.sync.aligned.m16n8k16", "mma.sync.aligned.m16n8k16"),
        ("gfx942", "v_mfma_f32_32x32x8", "v_mfma_f32_16x16x16"),
        ("gfx950", "v_mfma_f32_32x32x16", "v_mfma_f32_16x16x32"),
    ],
)
def test_matrix_instructions_are_those_that_the_docs_name(arch, of_prompts, of_steps):
    """docs/explanation/other-chips.md lists them."""
    products = {
        kernel["name"]: kernel["products"]
        for site in build(arch, "extend", "decode")
        for kernel in site["kernels"]
        if kernel["products"]
    }
    assert products == {"extend_tiles": [of_prompts], "decode_splits": [of_steps]}


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_hot_launches_of_sparse_mla(arch):
    """Over FP8 latents; test_every_launch has those over 16 bits too."""
    writes = ("write-latents", "write-index-fp8", "write-latents-index", "write-latents-index-fp8")
    names = ("dsa-decode-fp8", *writes, "score-prompts", "gather-pages")
    sites = judged(arch, *names, hot=True)
    assert [fault for site in sites for fault in site["faults"]] == []
    attends = ["attend_selected"]
    if arch == "sm90":
        attends = ["decode_selected", "decode_mla_hopper"]
    assert [[k["name"] for k in site["kernels"]] for site in sites] == [
        ["index_scores", "select_topk", *attends, "_merge"],
        ["write_latent"],
        ["write_index_rows"],
        ["write_both"],
        ["write_both"],
        ["score_prompts_hopper" if arch == "sm90" else "index_scores"],
        ["decode_pages", "place_slots"],
    ]


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_hot_launches_of_shared_prefixes(arch):
    names = ("verify-shared", "decode-shared", "verify-shared-56-rows", "verify-56-rows")
    sites = judged(arch, *names, hot=True)
    assert [fault for site in sites for fault in site["faults"]] == []
    attend = "decode_hopper" if arch == "sm90" else "decode_splits"
    kernels = [[k["name"] for k in site["kernels"]] for site in sites]
    shared, alone = ([plan, attend, "merge_splits"] for plan in ("plan_shared", "plan_splits"))
    assert kernels == [shared, shared, shared if arch == "sm90" else alone, alone]


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_hot_launches_of_linear_attention(arch):
    names = ("gdn-decode", "gdn-verify-tree", "gdn-commit", "gdn-prefill", "kda-prefill")
    names += ("gdn-prefill-alone", "gdn-prefill-ahead", "kda-prefill-alone", "gdn-prefill-fused")
    sites = judged(arch, *names, hot=True)
    assert [fault for site in sites for fault in site["faults"]] == []
    kernels = [[k["name"] for k in site["kernels"]] for site in sites]
    gdn, kda = (["prepare_gdn", "scan_chunks"], ["prepare_kda", "scan_chunks"])
    names = [gdn, kda, gdn, gdn, kda, gdn]
    if arch == "sm90":
        names = [
            ["prepare_gdn_hopper", "scan_hopper"],
            ["prepare_kda_hopper", "scan_hopper"],
            ["prepare_gdn_hopper", "scan_alone"],
            ["prepare_gdn_ahead", "scan_alone"],
            ["prepare_kda_hopper", "scan_alone"],
            ["fused_gdn_hopper"],
        ]
    assert kernels[3:] == names


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm120", "gfx942"])
def test_too_much_is_seen(arch):
    [site] = build(arch, "greedy")
    result = " ".join(faults(arch, site, hot=True))
    assert "bytes of shared memory" in result
    assert "spills" in result


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        # the factors of a product are dead for the compiler where it begins
        {"scratch": 1, "buffer": 1, "kept": 0},
        # a load may still be queued where its tile is given back to TMA
        {"nothing": 1, "sometimes": 1, "fenced": 0, "stored": 0},
    ],
)
def test_what_is_still_read_is_not_overwritten(found):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, BUILD.parent / "overwriting_kernel.py", *found]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {place: len(x) for place, x in json.loads(done.stdout).items()} == found


@pytest.mark.long
def test_the_softmax_runs_beside_a_product():
    """The assembler would wait for the product first, see finish_product."""
    least = {"extend": (32, 32), "extend-page-1": (32, 0), "extend-page-16": (32, 0)}
    least["verify-shared-56-rows"] = (32, 0)
    for triton in {None, os.environ.get(FIRST_GLUON)}:
        found = {
            site["site"]: kernel["beside"]
            for site in build("sm90", *least, triton=triton)
            for kernel in site["kernels"]
            if kernel["name"] in ("extend_hopper", "decode_hopper")
        }
        assert found.keys() == least.keys()
        for site, (maxima, exponentials) in least.items():
            assert found[site], site
            assert all(a >= maxima and b >= exponentials for a, b in found[site]), found


@pytest.mark.long
def test_what_no_row_declares_is_left_out():
    [site] = build("sm80", "decode-fp8")
    assert "kv_cache_dtype fp8_e4m3 (supports" in site["not_declared"]
    assert not list(faults("sm80", site, hot=True))


def test_sizes_that_are_compiled_for_and_products_that_wait_are_seen():
    kernel = {"name": "k", "specialised": ["batch", "rows"], "shared": 0, "registers": 9}
    kernel |= {"spills": 0, "serialized": True, "overwritten": []}
    site = {"site": "s", "kernels": [kernel]}
    assert list(faults("sm90", site, hot=True)) == [
        "s: k is compiled for sizes of a pass: ['batch', 'rows']",
        "s: k waits for each product before the next one begins",
    ]


LISTING = """
\t.text
first:
\ts_load_dwordx2 s[0:1], s[4:5], 0x10   ; the address of x
.LBB0_1:
\tv_add_u32 v0, v1, v2
\t.loc 1 7 3
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
\t.section .rodata
\t.amdhsa_next_free_vgpr 3
"""


def test_a_digest_is_of_the_instructions_alone():
    """Names, lines of source and the places of parameters are left out; nothing else is."""

    def digest(text):
        return build_kernels.digest(SimpleNamespace(asm={"amdgcn": text}))

    renamed = LISTING.replace("first", "second").replace("0x10", "0x28").replace("1 7 3", "1 9 1")
    assert digest(renamed) == digest(LISTING)
    assert digest(LISTING)["instructions"] == 5, "a label that is jumped to counts"
    assert digest(LISTING.replace("v_add_u32", "v_sub_u32")) != digest(LISTING)


@pytest.mark.long
def test_digests_of_one_checkout_agree():
    once, again = (build("sm80", "merge", "--digest") for _ in range(2))
    assert once == again
    assert all(len(kernel["digest"]) == 16 for site in once for kernel in site["kernels"])
