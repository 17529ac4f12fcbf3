"""The launch table is a pure function of shape and device, and what it says fits the device."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")  # the table does without, the package that it is in does not

from attn_core.backends.triton import tuning
from attn_core.backends.triton.shared import PARTS_PER_PROCESSOR
from attn_core.backends.triton.tuning import (
    LONG,
    decode_launch,
    extend_launch,
    head_parts,
    heads_at_once,
    hopper_block,
    hopper_launch,
    merge_tile,
    power_of_two,
    use_split_kv,
)

# KB of shared memory that a program may have
SHARED = {"sm75": 64, "sm80": 163, "sm86": 99, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}
EQUAL = (16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)
DIMS = [*((d, d) for d in EQUAL), (192, 128), (64, 128), (128, 64), (128, 256), (576, 512)]
REGISTERS = 65536  # of a multiprocessor of NVIDIA
ROWS = (1, 4, 8, 16, 17, 32, 64, 128, 2000)


def two(n):
    return n > 0 and n & (n - 1) == 0


@given(st.integers(1, 1 << 20), st.sampled_from([1, 2, 16, 64]))
def test_a_power_of_two_is_the_next_one(n, least):
    got = power_of_two(n, least)
    assert two(got)
    assert got >= max(n, least)
    assert got == least or got < 2 * n


@given(st.integers(1, 1024))
def test_two_tiles_cover_a_head_and_waste_less_than_one_would(dim):
    first, rest = head_parts(dim)
    assert first >= 16
    assert two(first)
    assert rest == 0 or (rest >= 16 and two(rest))
    assert dim <= first + rest <= power_of_two(dim)
    assert rest == 0 or first < dim


def test_head_parts_of_known_heads():
    known = {13: (16, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0)}
    known |= {192: (128, 64), 256: (256, 0), 576: (512, 64)}
    assert {dim: head_parts(dim) for dim in known} == known


@given(st.integers(1, 64), st.integers(1, 64))
def test_fewer_queries_are_few_as_well(queries, group):
    for latent in (False, True):
        if use_split_kv(queries + 1, group, latent=latent):
            assert use_split_kv(queries, group, latent=latent)
    if use_split_kv(queries, group + 1, latent=False):
        assert use_split_kv(queries, group, latent=False)


def test_which_passes_split_keys():
    assert use_split_kv(1, 16, latent=False)
    assert use_split_kv(8, 8, latent=False), "verifying 8 drafts reads the keys once"
    assert use_split_kv(4, 128, latent=True)
    assert not use_split_kv(129, 1, latent=False)
    assert not use_split_kv(4096, 1, latent=True)


def launches(arch, store_bytes):
    for d, dv in DIMS:
        yield (d, dv, "extend"), extend_launch(arch, d, dv, store_bytes)
        for rows in ROWS:
            for short in (False, True):
                launch = decode_launch(arch, rows, d, dv, store_bytes, short=short)
                yield (d, dv, rows), launch


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"requests": 16, "page_size": 64}, 64),
        ({"requests": 17, "page_size": 64}, 16),
        ({"page_size": 64}, 16),
        ({"requests": 16, "page_size": 1}, 16),
        ({"requests": 16, "page_size": 64, "tree": True}, 16),
    ],
)
def test_few_requests_over_latents_take_hoppers_tiles(more, rows):
    """Where its kernel can run: with pages that TMA reads, and without a tree."""
    assert decode_launch("sm90", 16, 576, 512, 2, **more).block_m == rows


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"shared": True}, 128),
        ({"shared": True, "page_size": 8}, 128),
        ({"rows": 56}, 128),
        ({"rows": 32}, 64),
        ({"shared": True, "tree": True}, 128),
        ({"shared": True, "tree": True, "page_size": 8}, 128),
        ({"shared": True, "page_size": 1}, 64),
        ({"shared": True, "dim": 64}, 64),
        ({"shared": True, "requests": 15}, 64),
        ({"rows": 56, "short": True}, 64),
    ],
    ids=str,
)
def test_full_tiles_of_many_requests_take_large_steps(more, keys):
    """On a Hopper where TMA reads pages; shared memory has one such step, or two small ones."""
    more = {"rows": 64, "dim": 128, "page_size": 64, "requests": 16} | more
    rows, dim = more.pop("rows"), more.pop("dim")
    launch = decode_launch("sm90", rows, dim, dim, 2, **more)
    assert (launch.block_m, launch.block_n, launch.block_n * launch.stages) == (64, keys, 128)


def test_over_fp8_tiles_of_few_rows_are_launched_as_without_groups():
    """Larger ones keep blocks of 64 keys."""
    for shape in ((16, 64, 64), (16, 128, 128), (16, 256, 256)):
        assert decode_launch("sm90", *shape, 1, shared=True) == decode_launch("sm90", *shape, 1)
    assert decode_launch("sm90", 16, 128, 128, 1, shared=True).block_n == 128
    assert decode_launch("sm90", 32, 128, 128, 1, shared=True).block_n == 64


@pytest.mark.parametrize("arch", [*SHARED, "gfx942", "gfx950", "interpreter"])
@pytest.mark.parametrize("store_bytes", [1, 2, 4])
def test_a_launch_is_one_that_triton_takes(arch, store_bytes):
    for shape, launch in launches(arch, store_bytes):
        assert two(launch.block_m), shape
        assert launch.block_m >= 16, shape
        assert two(launch.block_n), shape
        assert launch.block_n >= 16, shape
        assert launch.warps in (1, 2, 4, 8), shape
        assert launch.stages >= 1, shape
        assert launch.ctas_per_sm >= 1, shape
        if arch == "sm90" and store_bytes == 2 and launch.block_m >= 64:  # Hopper's own kernels
            assert launch.ctas_per_sm <= PARTS_PER_PROCESSOR, shape
        # a limit is there for the programs to run at once; only NVIDIA's compiler knows one
        threads = 32 * launch.warps * launch.ctas_per_sm
        assert launch.max_registers * threads <= (REGISTERS if arch.startswith("sm") else 0), shape


def test_no_more_rows_than_the_shape_has_room_for():
    for d, dv in DIMS:
        for rows in ROWS:
            assert decode_launch("sm80", rows, d, dv, 2).block_m <= power_of_two(rows)


def needed(shape, launch, store_bytes):
    """Return the bytes that the keys and values of all stages take; MLA's values are its keys."""
    d, dv, _ = shape
    columns = sum(head_parts(d)) + (0 if (d, dv) == (576, 512) else power_of_two(dv))
    return launch.stages * launch.block_n * columns * store_bytes


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("store_bytes", [1, 2, 4])
def test_the_keys_of_all_stages_fit_into_shared_memory(arch, store_bytes):
    room = SHARED[arch] * 1024
    over = {
        shape: (bytes_, launch)
        for shape, launch in launches(arch, store_bytes)
        if (bytes_ := needed(shape, launch, store_bytes)) > room
    }
    assert not over


@given(
    st.integers(1, 4096), st.integers(1, 64), st.integers(1, 528), st.sampled_from([64, 128, 512])
)
def test_a_merge_covers_the_rows_and_columns_of_a_tile(tiles, tile_rows, programs, width):
    columns, rows, partials, warps = merge_tile(tiles, tile_rows, programs, width)
    assert width % columns == 0
    assert two(partials)
    assert rows in (1, 2, 4)
    assert rows == 1 or tiles * tile_rows // rows >= 2048, "programs for the whole device"
    assert warps in (1, 2, 4)
    assert partials * columns <= 8192 * warps, "256 values a thread at most"


@pytest.mark.parametrize("longest", [100, 1000, 2000, LONG])
def test_what_hopper_holds_fits(longest):
    for dim in EQUAL:
        block = hopper_block(dim, dim)
        if block is not None:
            launch = hopper_launch(dim, longest, 10_000, 132)
            assert block % launch.block_n == 0  # pages were judged by the larger one
            tiles = launch.block_m + 2 * launch.stages * launch.block_n  # queries, keys and values
            assert tiles * dim * 2 <= SHARED["sm90"] * 1024
    assert hopper_block(128, 128)
    assert hopper_block(192, 128) is None


@given(
    st.sampled_from([64, 128, 256]),
    st.integers(1, 4096),
    st.integers(0, 512),
    st.integers(1, 1024),
    st.integers(0, 1024),
)
def test_longer_prompts_take_no_smaller_tiles_and_more_tiles_no_fewer_rows(
    dim, longest, longer, tiles, more
):
    """Many tiles hide what a step costs besides its keys, so that they may have fewer keys."""
    small = hopper_launch(dim, longest, tiles, 132)
    large = hopper_launch(dim, longest + longer, tiles, 132)
    assert (small.block_m, small.block_n) <= (large.block_m, large.block_n)
    assert small.block_m <= hopper_launch(dim, longest, tiles + more, 132).block_m
    assert hopper_launch(dim, 1, 1, 132).block_m < 128 or dim == 256


@given(st.integers(1, 128), st.integers(0, LONG), st.sampled_from([256, 512, 1024]))
def test_heads_that_take_turns_divide_them_and_are_cached(heads, longest, key_bytes):
    n = heads_at_once(heads, longest, key_bytes)
    assert heads % n == 0
    assert n == 1 or n * longest * key_bytes <= 1 << 24
    more = [m for m in range(n + 1, heads + 1) if heads % m == 0]
    assert all(m * longest * key_bytes > 1 << 24 for m in more)


def test_prompts_that_fill_half_a_tile_are_few_only_where_keys_are_cut():
    assert use_split_kv(128, 1, latent=False)
    assert not use_split_kv(128, 1, latent=False, unsplit=True)
    assert use_split_kv(64, 1, latent=False, unsplit=True)
    assert use_split_kv(16, 128, latent=True, unsplit=True)


def test_what_the_table_was_measured_with_is_recorded():
    root = pathlib.Path(__file__).parents[2]
    named = re.findall(r"attention[.]\S+[.]json", tuning.__doc__)
    assert named
    for name in named:
        record = json.loads((root / "benchmarks/results" / name).read_text())
        assert record["suite"] == name.split(".")[2]
        assert "H200" in record["device"]


def test_no_other_module_names_an_architecture():
    """variants.py says which kernels it has, tuning.py and tuning_fp4.py how they are launched."""
    folder = pathlib.Path(tuning.__file__).parent
    named = re.compile(r"""["'](?:sm\d+|gfx\d+)""")
    code = {
        path.relative_to(folder).as_posix(): re.sub(r'"""[\s\S]*?"""', "", path.read_text())
        for path in folder.rglob("*.py")
    }
    assert {name for name, text in code.items() if named.search(text)} == {
        "linear/launch.py",  # which products of float32 a chip has
        "linear/tuning.py",
        "tuning.py",
        "tuning_fp4.py",
        "variants.py",
    }


def test_the_table_needs_no_torch_and_no_triton():
    code = f"import sys; import {tuning.__name__}; "
    code += "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm120", "gfx942", "gfx950"])
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_fp8_latents_fit_beside_queries_of_32_bits(arch, rows):
    """They become as wide as the queries in shared memory, where 128 of them took 396 KiB."""
    launch = decode_launch(arch, rows, 576, 512, 1, query_bytes=4)
    stored = launch.stages * launch.block_n * 576
    wide = (launch.block_n * 512 + launch.block_m * 64) * 4
    assert stored + wide <= tuning._SHARED.get(arch, 227) * 1024
