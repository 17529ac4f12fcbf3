"""A value of another type or size is refused where it is given, with what is expected there."""

import pathlib

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BatchError,
    CacheView,
    ForwardBatch,
    ForwardMode,
    Gate,
    KVPool,
    LayerCache,
    LayerRequirements,
    LinearLayer,
    Overrides,
    Requirements,
    SpecInfo,
    Speculation,
    StatePool,
    UsageError,
    Workload,
    copy_slots,
    load_plugins,
    merge_states,
    num_pages_for,
    pad_batch,
    parse_device,
    read_index,
    read_pages,
    read_profile,
    reusable_prefix,
    select,
    slot_table,
    split_cache,
    split_pages,
    to_csr,
    write_index,
)

TABLE = torch.zeros(2, 4, dtype=torch.int32)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def layer(**change):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    return AttentionLayer(**{"layer_id": 0, "scale": 0.25, **shape, **change})


def linear(**change):
    shape = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16}
    return LinearLayer(**{"layer_id": 0, **shape, **change})


def view(**change):
    lengths = {"seq_lens": ints(1, 2), "max_seq_len": 2, "out_cache_loc": None}
    return CacheView(**{"page_table": TABLE, **lengths, **change})


def batch(**change):
    queries = {"cu_seqlens_q": ints(0, 1, 3), "positions": torch.tensor([0, 0, 1]), "max_q_len": 2}
    return ForwardBatch(**{"forward_mode": ForwardMode.EXTEND, **queries, **change})


def tree(mask):
    return SpecInfo(topk=2, num_draft_tokens=3, tree_mask=mask)


def verify(spec):
    lengths = {"query_lens": [3, 3], "seq_lens": [3, 4], "page_table": TABLE, "page_size": 2}
    return ForwardBatch.build(ForwardMode.TARGET_VERIFY, **lengths, spec=spec)


def chosen(requirements=None, device=None, registry=None, libraries=None, *more, **options):
    return select(
        requirements or Requirements(),
        device or parse_device("cpu:avx2"),
        registry or load_plugins(),
        {} if libraries is None else libraries,
        *more,
        **options,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: view(page_table=None), "page_table is NoneType"),
        (lambda: view(seq_lens=[1, 2]), "seq_lens is list"),
        (lambda: view(max_seq_len=None), "max_seq_len"),
        (lambda: view(max_seq_len=2.5), r"max_seq_len \[2.5\] \(expected integers"),
        (lambda: view(max_seq_len=-1), "max_seq_len -1"),
        (lambda: view(seq_lens_host=("a", 2)), "seq_lens_host .*expected integers"),
        (lambda: batch(cu_seqlens_q=None), "cu_seqlens_q is NoneType"),
        (lambda: batch(positions=[0, 0, 1]), "positions is list"),
        (lambda: batch(max_q_len=None), "max_q_len"),
        (lambda: batch(views=[1]), "views is list"),
        (lambda: batch(views={"full": TABLE}), "view 'full' is Tensor"),
        (lambda: batch(spec=4), "spec is int"),
        (lambda: batch(query_lens_host=("a", 1)), "query_lens_host"),
        (lambda: batch(state_slots=[0, 1]), "state_slots is list"),
        (lambda: SpecInfo(topk=None, num_draft_tokens=3), "topk"),
        (lambda: SpecInfo(topk=1, num_draft_tokens=3.0), "num_draft_tokens"),
        (lambda: SpecInfo(topk=1, num_draft_tokens=1, tree_mask=[1]), "tree_mask is list"),
        (lambda: verify(4), r"spec is int"),
        (lambda: verify(tree(torch.zeros(2, 3, 3))), "tree_mask is torch.float32"),
        (lambda: verify(tree(torch.ones(2, 2, 3).bool())), r"tree_mask has shape \(2, 2, 3\)"),
        (lambda: verify(tree(torch.ones(2, 3, 3).bool().to("meta"))), "tree_mask on meta"),
        (lambda: pad_batch(TABLE, ints(1), 4), "1 lengths for 2 requests"),
        (
            lambda: ForwardBatch.build(
                ForwardMode.EXTEND, query_lens=[1], seq_lens=3, page_table=TABLE, page_size=2
            ),
            "lengths 3",
        ),
    ],
)
def test_a_batch(call, message):
    with pytest.raises(BatchError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Requirements(layers=LayerRequirements()), "layers is .*tuple of LayerReq"),
        (lambda: Requirements(layers=(layer(),)), r"LayerRequirements\.of\(layer\)"),
        (lambda: Requirements(kv_cache_dtype=torch.float16), "kv_cache_dtype is torch.float16"),
        (lambda: Requirements(dtype=None), "dtype is None"),
        (lambda: Requirements(speculation=4), "speculation is 4"),
        (lambda: Requirements(vision=layer()), "vision is"),
        (lambda: Requirements(lse="no"), "lse is 'no'"),
        (lambda: LayerRequirements(kind="foo"), "kind 'foo'"),
        (lambda: LayerRequirements(sinks=torch.ones(4)), "sinks is tensor"),
        (lambda: LayerRequirements(dual_chunk=7), "dual_chunk is 7"),
        (lambda: LayerRequirements(kind="gdn", conv_width="4"), "conv_width '4'"),
        (lambda: Speculation(topk=True), "topk True"),
        (lambda: layer(dual_chunk=5), "dual_chunk is 5"),
        (lambda: layer(vertical_slash=5), "vertical_slash is 5"),
        (lambda: layer(view=None), "view is None"),
        (lambda: layer(layer_id="a"), "layer_id is 'a'"),
        (lambda: linear(scale="a"), "scale 'a'"),
        (lambda: linear(qk_norm="x"), "qk_norm 'x'"),
        (lambda: linear(gate=5), "gate is 5"),
        (lambda: Gate(A_log=[1.0], dt_bias=torch.ones(1)), r"A_log is \[1.0\]"),
        (
            lambda: Gate(A_log=torch.ones(1), dt_bias=torch.ones(1), lower_bound="a"),
            "lower_bound 'a'",
        ),
        (lambda: parse_device(torch.device("cpu")), "device device"),
        (lambda: chosen(device="cpu"), r"device is 'cpu' .*parse_device"),
        (lambda: chosen(libraries=["triton"]), r"libraries is \['triton'\]"),
        (lambda: chosen(None, None, None, None, "triton"), "overrides is 'triton'"),
        (lambda: chosen(None, None, None, None, None, "file"), "profile is 'file'"),
        (lambda: chosen(workload={}), "workload is {}"),
        (lambda: chosen(None, None, None, None, Overrides(prefer="triton")), "prefer is 'triton'"),
        (lambda: chosen(None, None, None, None, Overrides(attention_backend=5)), "backend is 5"),
    ],
)
def test_a_selection(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def pool(**change):
    form = {"num_pages": 4, "page_size": 4, "kv_cache_dtype": "fp32"}
    return KVPool([layer()], **{**form, **change})


def cache():
    return pool().layer(0)


def indexed():
    latent = layer(num_kv_heads=1, head_dim=64, v_head_dim=32)
    form = {"num_pages": 4, "page_size": 4, "kv_cache_dtype": "fp32", "kind": "dsa"}
    return KVPool([latent], index_dim=8, index_dtype="fp32", **form).layer(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pool(kv_cache_dtype=torch.float32), "torch.float32"),
        (lambda: pool(index_dim=1.5), "index_dim 1.5"),
        (
            lambda: KVPool.pages_that_fit(9, [], page_size=1, kv_cache_dtype="fp32"),
            "no layers",
        ),
        (lambda: StatePool([linear(), linear()], num_slots=2), r"layers \[0, 0\]"),
        (lambda: LayerCache(k=cache().k, v=cache().v, layout="x"), "layout 'x'"),
        (lambda: num_pages_for(5, 0), "page size 0"),
        (lambda: reusable_prefix(5, 0), "page size 0"),
        (lambda: slot_table(TABLE, 2.0), "page size 2.0"),
        (lambda: split_pages(TABLE, 4, 0), "page size 0"),
        (lambda: split_cache(cache(), -1), "page size -1"),
        (lambda: to_csr(TABLE, ints(1, 2), 0), "page size 0"),
        (lambda: read_pages(cache(), torch.tensor([9]), torch.float32), "pages 9 to 9 of a cache"),
        (lambda: copy_slots(cache(), ints(1), ints(2)), "expected as many, int64"),
        (lambda: write_index(indexed(), torch.ones(1, 8), torch.tensor([16])), "slots 16 to 16"),
        (lambda: read_index(indexed(), torch.tensor([-1]), torch.float32), "slots -1 to -1"),
        (lambda: merge_states(torch.ones(2, 1, 1, 1).int(), torch.ones(2, 1, 1)), "int32"),
    ],
)
def test_a_cache(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_pages_that_fit_into_a_part_of_the_memory_are_a_whole_number():
    pages = KVPool.pages_that_fit(1e6 * 0.9, [layer()], page_size=4, kv_cache_dtype="fp32")
    assert type(pages) is int
    assert pages == 900_000 // (4 * 2 * 2 * 16 * 4)


def test_a_profile_is_read_from_a_path_in_a_text(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text("{}")
    with pytest.raises(UsageError) as text:
        read_profile(str(file))
    with pytest.raises(UsageError) as path:
        read_profile(pathlib.Path(file))
    assert str(text.value) == str(path.value)


def test_what_is_valid_passes():
    assert Workload() is not None
    lengths = (1, 2)
    assert batch(views={"full": view(seq_lens_host=lengths)}).views["full"].max_seq_len == 2
    assert chosen(Requirements(layers=[LayerRequirements()])).roles["decode"].backend
