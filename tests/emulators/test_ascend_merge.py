"""npu_attention_update behind attn_core.merge_states: the numbers of torch."""

import pytest
import torch
from attn_ascend import merge
from attn_core import merge_states

INF = torch.inf


def states(lse, *, dtype=torch.float32, width=16):
    """Return parts [n, 1, H, width] and their log-sum-exp [n, 1, H]."""
    lse = torch.tensor(lse)[:, None]
    g = torch.Generator().manual_seed(3)
    return torch.randn(*lse.shape, width, generator=g).to(dtype), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "lse",
    [
        [[0.5, 80.0, -3.0], [1.5, 70.0, 90.0]],
        [[0.5, -INF, -INF], [-INF, 2.0, -INF], [-INF, -INF, -INF]],
        [[INF, INF, 3.0], [4.0, INF, -INF], [-INF, 1.0, INF]],
        [[-1e30, 0.0]],
    ],
)
def test_it_merges_as_torch_does(vendor, lse, dtype):
    out, lse = states(lse, dtype=dtype)
    out = out.masked_fill((lse == -INF)[..., None], torch.nan)  # an empty part may hold anything
    merged, total = merge.merge_states(out, lse)
    expected, expected_total = merge_states(out, lse)
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(total, expected_total)
    assert merged.dtype == dtype
    assert total.dtype == torch.float32


def test_parts_of_any_strides_and_of_no_token(vendor):
    out, lse = torch.randn(4, 3, 16, 2).transpose(2, 3), torch.randn(3, 4, 2).transpose(0, 1)
    for x, y in zip(merge.merge_states(out, lse), merge_states(out, lse), strict=True):
        torch.testing.assert_close(x, y)
    merged, total = merge.merge_states(out[:, :0], lse[:, :0])
    assert merged.shape == (0, 2, 16)
    assert total.shape == (0, 2)


@pytest.mark.parametrize(
    ("parts", "width"), [(16, 512), (17, 16), (2, 4), (2, 20), (2, 520), (2, 0), (0, 16)]
)
def test_what_the_operator_does_not_take_is_merged_by_torch(vendor, parts, width):
    out, lse = torch.randn(parts, 3, 2, width), torch.randn(parts, 3, 2)
    for x, y in zip(merge.merge_states(out, lse), merge_states(out, lse), strict=True):
        torch.testing.assert_close(x, y)


def test_a_backend_that_returns_states_gives_npu_tensors_this_kernel(vendor):
    merge.register()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("attn_core::merge_states", "PrivateUse1")
    assert not has("attn_core::merge_states", "CUDA")
