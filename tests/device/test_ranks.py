"""Two GPUs: heads and keys split over ranks, in CUDA graphs too, and one choice for both.

Run: `NCCL_NVLS_ENABLE=0 pytest tests/device/test_ranks.py`. The same as a record, with versions:
`python -m benchmarks.ranks`.
"""

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from benchmarks.rank_passes import GRAPHS, PASSES
from benchmarks.ranks import BACKENDS, rows


@pytest.fixture(scope="module")
def found():
    """What two ranks have in the end, beside one device, and what they chose."""
    return rows(2, "cuda", BACKENDS["cuda"])


@pytest.mark.parametrize("name", [*PASSES, *GRAPHS])
@pytest.mark.parametrize("backend", BACKENDS["cuda"])
def test_ranks_together_give_the_attention_of_one_device(found, backend, name):
    [row] = [r for r in found if (r.get("backend"), r["pass"]) == (backend, name)]
    assert row["passed"], row


def test_ranks_choose_alike_and_drop_what_one_lacks(found):
    alike, without = (row for row in found if row["pass"] == "choice")
    assert alike["passed"], alike
    assert without["passed"], without
