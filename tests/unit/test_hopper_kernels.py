"""What can be said of the Hopper kernels where there is no Hopper."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from attn_core.backends.triton.hopper.decode import decode_hopper
from attn_core.backends.triton.hopper.mla_decode import decode_mla_hopper
from attn_core.backends.triton.hopper.prefill import extend_hopper


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (decode_hopper, {"batch", "window", "drafts", "table_stride"}),
        (decode_mla_hopper, {"batch", "table_stride"}),
        (extend_hopper, {"batch", "heads_at_once", "window", "table_stride"}),
    ],
    ids=["decode", "mla", "extend"],
)
def test_no_kernel_is_compiled_for_one_size_of_a_pass(kernel, sizes):
    free = {param.name for param in kernel.params if param.do_not_specialize}
    assert free == sizes  # of a tuple the numbers would be specialised all the same
