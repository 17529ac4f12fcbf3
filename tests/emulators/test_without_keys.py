"""Queries that see no key, on every emulated backend that can be asked for them."""

import pytest
from attn_core.errors import UnsupportedError
from attn_core.runtime.batch import ForwardMode
from without_keys import RAGGED, check_cross, check_ragged

CROSS = [
    ("fa3", "sm90", True),
    ("fa3", "sm90", False),
    ("fa4", "sm90", False),
    ("fa4", "sm100", True),
    ("fa4", "sm100", False),
    ("flashinfer", "sm90", False),
]


RAGGED_ALONE = [("fa4", "sm90", True), ("ascend", "910b", True)]


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize(("name", "arch", "sinks"), [*CROSS, *RAGGED_ALONE])
def test_a_ragged_query_without_keys(name, arch, sinks, case, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    if name == "flashinfer" and RAGGED[case][2]:
        with pytest.raises(UnsupportedError, match="fewer keys than queries"):
            check_ragged(name, case, sinks=sinks, arch=arch, device="cpu")
        return
    check_ragged(name, case, sinks=sinks, arch=arch, device="cpu")


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("name", "arch", "sinks"), CROSS)
def test_a_request_without_encoder_tokens(name, arch, sinks, mode, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    check_cross(name, mode, sinks=sinks, arch=arch, device="cpu")
