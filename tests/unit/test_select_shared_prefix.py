"""`attn select --shared-prefix` says what it brings, by the rule by which plans form groups."""

import json

import pytest
from attn_core.costs.shared_prefix import fits_tile, largest_tile, shared_tile_rows
from attn_core.costs.workload import Workload
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import Choice, Selection
from attn_core.selection.shared_prefix import sharing_of
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation

LAYERS = ("--head-dim", "128", "--num-q-heads", "32", "--num-kv-heads", "8")


def shared_prefix(here, *more):
    """Return what `attn select --shared-prefix` says of sharing, and what it prints of it."""
    workload = '{"prompts": {"4096": 0.9, "200": 0.1}, "requests": {"1": 0.5, "64": 0.5}}'
    device = ("select", "--device", "cuda:sm90", "--assume-installed", "all")
    asked = (*device, "--shared-prefix", "--workload", workload, *more)
    text = here(*asked, COLUMNS="1000").stdout
    lines = [line for line in text.splitlines() if line.startswith("  sharing")]
    return json.loads(here(*asked, "--json").stdout)["shared_prefix"], lines


def test_select_says_what_shared_prefixes_bring_to_the_workload(here):
    [found], [line] = shared_prefix(here, *LAYERS)
    assert (found["role"], found["least"]) == ("decode", 256)
    short, long = found["gains"]
    assert (short["shared"], long["shared"]) == (0, 4096)
    key = 2 * 128 * 8 * 2  # of K and V, 16 bits each
    assert long["alone_bytes"] == 64 * (4096 + 128) * key
    partials = 64 * 32 * 129 * 4 * 2 * 2  # of own and of shared keys, written and read
    assert long["bytes"] == (4096 + 64 * 128) * key + partials
    assert short["bytes"] == short["alone_bytes"] == 64 * (200 + 128) * key
    assert "from 256 tokens on" in line
    assert "64 requests over a prompt of 4096 tokens read 54.6 MB a layer, not 1107.3" in line
    assert "64 requests over a prompt of 200 tokens share too little of it" in line


@pytest.mark.parametrize(
    ("more", "least", "why"),
    [
        ((), None, "give --head-dim, --num-q-heads and --num-kv-heads, or --model"),
        ((*LAYERS, "--deterministic"), None, "in deterministic mode"),
        ((*LAYERS, "--sliding-window", "512"), None, "with a window read every request"),
        (("--kind", "mla", "--num-q-heads", "128"), None, "128 query rows a KV head (at most 32"),
        (("--kind", "mla", "--num-q-heads", "16"), 1024, ""),
        ((*LAYERS, "--kv-cache-dtype", "fp8_e4m3"), 512, ""),
    ],
    ids=["unknown", "deterministic", "window", "many heads", "latents", "fp8"],
)
def test_select_says_where_no_groups_are_formed(here, more, least, why):
    [found], [line] = shared_prefix(here, *more)
    assert found["least"] == least
    assert why in found["why"]
    assert bool(why) != bool(found["gains"])
    assert found["why"] in line


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_the_rule_that_select_prints_is_that_of_the_plan(arch):
    """Of tiles of drafts too: with 28 query and 4 KV heads two requests of 8 fit a Hopper's."""
    shared = pytest.importorskip("attn_core.backends.triton.shared")
    decode_launch = pytest.importorskip("attn_core.backends.triton.tuning").decode_launch
    row = next(r for r in load_plugins().get("triton").capabilities if r.kind == "mha")
    kinds = [(32, 8, 128, 1), (28, 4, 128, 4), (28, 4, 128, 8), (16, 1, 64, 1), (64, 1, 256, 1)]
    kinds += [(32, 2, 128, 4), (28, 4, 64, 8), (36, 4, 128, 8)]
    found = []
    for q, kv, dim, drafts in kinds:
        shape = {"num_q_heads": q, "num_kv_heads": kv, "head_dim": dim, "v_head_dim": dim}
        spec = Speculation(num_draft_tokens=drafts)
        needs = Requirements(
            layers=(LayerRequirements(**shape),), shared_prefix=True, speculation=spec
        )
        role = "decode" if drafts == 1 else "verify"
        chosen = Selection(
            requirements=needs,
            roles={role: Choice("triton", row, "")},
            page_size=16,
            device=Device("cuda", arch),
        )
        [one] = sharing_of(chosen, Workload(requests={64: 1.0}))
        layer, rows = AttentionLayer(layer_id=0, scale=1.0, **shape), drafts * q // kv
        plan = None
        largest = largest_tile(arch, dim, dim, 2, 16, 64)
        if fits_tile(rows, largest):
            sizes = (arch, shared_tile_rows(rows, dim, "bf16", False, largest), dim, dim, 2)
            launch = decode_launch(*sizes, page_size=16, shared=True, requests=64)
            plan = shared.sharing_of(layer.group, drafts, 16, 2, launch)
        assert one.least == (None if plan is None else plan.granule)
        found.append(plan is not None)
    hopper = arch == "sm90"
    assert found == [True, True, hopper, True, False, hopper, False, False]
