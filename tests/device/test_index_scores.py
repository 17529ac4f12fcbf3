"""Hopper's scores of prompts on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from prompt_scores import check_scores

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of sm90")


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [((5000, 2100, 300, 2048), (700, 2100, 300, 1)), ((20_000,), (4096,))],
)
def test_scores_are_those_of_the_portable_kernel(heads, lengths, queries):
    """Prompts behind a prefix, one of a whole request, one query, one that needs no scores."""
    check_scores(heads, lengths, queries)
