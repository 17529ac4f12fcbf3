"""FlashInfer's MLA on a real GPU, where a tile of its kernels ends between a query's heads."""

import pytest
import torch
from attn_core.errors import BackendError
from attn_core.spec.device import probe_device
from mla_passes import BETWEEN_TILES, Pass

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize(("heads", "queries", "keys"), BETWEEN_TILES)
def test_heads_of_a_query_between_two_tiles_see_its_own_key(heads, queries, keys):
    changes = {"heads": (heads, 1), "query_lens": queries, "seq_lens": keys}
    that = Pass("flashinfer", "mla-prefill", arch=probe_device().arch, device="cuda", **changes)
    try:
        backend = that.backend()
    except (BackendError, ImportError) as error:
        pytest.skip(str(error))
    that.check(backend)
