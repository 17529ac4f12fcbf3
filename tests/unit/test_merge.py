"""Merged partial attentions equal attention over all keys, with any split and any scale."""

import pytest
import torch
from attn_core.errors import UsageError
from attn_core.ops.merge import merge_states


def attend(scores, values):
    """scores float64 [T, H, K], values [K, H, D] → out, natural-log lse."""
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num()
    return torch.einsum("thk,khd->thd", p, values), lse


def parts(shift=0.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(5, 3, 20, generator=g, dtype=torch.float64) * 4
    scores[..., 7:] += shift
    values = torch.randn(20, 3, 8, generator=g, dtype=torch.float64)
    pieces = [attend(scores[..., a:b], values[a:b]) for a, b in ((0, 7), (7, 8), (8, 20))]
    out = torch.stack([o for o, _ in pieces]).to(dtype)
    lse = torch.stack([s for _, s in pieces]).float()
    return out, lse, attend(scores, values)


@pytest.mark.parametrize("shift", [0.0, 200.0, -200.0])
def test_merge_is_attention_over_all_keys(shift):
    out, lse, (want, want_lse) = parts(shift)
    got, got_lse = merge_states(out, lse)
    # the error of an lse is that of its float32 rounding, and exp() hands it on
    slack = 4 * torch.finfo(torch.float32).eps * (1 + lse.abs().max())
    assert (got - want).abs().max() <= slack * want.abs().max()
    assert (got_lse - want_lse).abs().max() <= slack
    assert got_lse.dtype == torch.float32


def test_a_merge_can_be_merged_and_order_does_not_matter():
    out, lse, _ = parts()
    a, b = merge_states(out[:2], lse[:2]), merge_states(out[:2].flip(0), lse[:2].flip(0))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    both = (torch.stack([x, y]) for x, y in zip(a, (out[2], lse[2]), strict=True))
    for x, y in zip(merge_states(*both), merge_states(out, lse), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_an_empty_part_may_hold_anything():
    out, lse, _ = parts()
    junk = torch.full_like(out[0], float("nan"))
    empty = torch.full_like(lse[0], -torch.inf)
    got, got_lse = merge_states(torch.stack([out[0], junk]), torch.stack([lse[0], empty]))
    assert torch.equal(got, out[0])
    assert torch.equal(got_lse, lse[0])


def test_all_empty_is_zero_and_minus_infinity():
    lse = torch.full((3, 2, 4), -torch.inf)
    out, total = merge_states(torch.full((3, 2, 4, 8), float("nan")), lse)
    assert not out.any()
    assert (total == -torch.inf).all()


def test_a_part_that_is_broken_is_not_hidden():
    out, lse, _ = parts()
    out[0, 0] = float("nan")
    lse[0] -= 300  # its weight rounds to zero, the NaN must still show
    assert merge_states(out, lse)[0][0].isnan().all()


def test_states_that_do_not_fit_are_refused():
    out = torch.zeros(2, 3, 4, 8)
    for lse in (torch.zeros(2, 4, 3), torch.zeros(2, 3, 4, 1), torch.zeros(1, 3, 4)):
        with pytest.raises(UsageError, match=r"expected \[n, T, H, Dv\] and \[n, T, H\]"):
            merge_states(out, lse)


def test_low_precision_is_accumulated_in_float32():
    out = torch.cat((torch.full((1, 1, 1, 4), 256.0), torch.ones(255, 1, 1, 4))).bfloat16()
    got, _ = merge_states(out, torch.zeros(256, 1, 1))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.full((1, 1, 4), (256 + 255) / 256).bfloat16())


def endless_parts():
    """Return three parts: a finite one, one of +inf in row 0, and two of them in row 1."""
    out, lse, _ = parts()
    lse[1, 0] = lse[1, 1] = lse[2, 1] = torch.inf
    return out, lse


def test_a_part_of_infinite_weight_wins_wholly():
    """Finite parts count no more beside it, and those of infinite weight share."""
    out, lse = endless_parts()
    finite, finite_lse = merge_states(*parts()[:2])
    got, total = merge_states(out, lse)
    assert torch.equal(got[0], out[1, 0])
    assert torch.equal(got[1], (out[1, 1] + out[2, 1]) / 2)
    assert (total[:2] == torch.inf).all()
    assert torch.equal(got[2:], finite[2:])
    assert torch.equal(total[2:], finite_lse[2:])


def test_a_part_that_is_outweighed_may_hold_anything():
    out, lse = endless_parts()
    want, _ = merge_states(out, lse)
    junk = out.clone()
    junk[0, :2] = junk[2, 0] = torch.nan
    assert torch.equal(merge_states(junk, lse)[0], want)


def test_an_unknown_weight_is_not_hidden_by_an_infinite_one():
    out, lse = endless_parts()
    lse[0, 0] = torch.nan
    got, total = merge_states(out, lse)
    assert got[0].isnan().all()
    assert total[0].isnan().all()
