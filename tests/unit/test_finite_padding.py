"""No row that needs finite numbers in unused pages is chosen where an engine promises none."""

from types import SimpleNamespace

import pytest
from attn_core import (
    NoBackendError,
    Overrides,
    Requirements,
    Speculation,
    load_plugins,
    parse_device,
    select,
)
from attn_core.integrations.vllm.server import stays_finite


def chosen(needs, names=None):
    """Return the selection on Hopper with all libraries at hand."""
    registry = load_plugins()
    libraries = dict.fromkeys(["triton", "flash-attn-3", "flashinfer-python"])
    here = parse_device("cuda:sm90")
    return select(needs, here, registry, libraries, names or Overrides(), simulated=True)


@pytest.mark.parametrize("speculation", [None, Speculation(topk=1, num_draft_tokens=4)])
def test_no_row_that_requires_finite_padding_is_chosen_or_picked(speculation):
    needs = Requirements(finite_padding=False, speculation=speculation)
    result = chosen(needs)
    rows = [choice.row for choice in result.roles.values()]
    rows += [choice.row for others in result.alternatives.values() for choice in others]
    assert rows
    assert not any(row.requires_finite_padding for row in rows)
    with pytest.raises(NoBackendError, match="unused pages that may hold NaN"):
        chosen(needs, Overrides(attention_backend="fa3"))
    assert chosen(Requirements(), Overrides(attention_backend="fa3")).backend("decode") == "fa3"


@pytest.mark.parametrize(
    ("sleeps", "stored", "stays"),
    [(False, "bf16", True), (True, "bf16", False), (True, "fp8_e4m3", True), (None, "bf16", True)],
)
def test_vllm_clears_only_quantised_caches_when_it_wakes_up(sleeps, stored, stays):
    model = SimpleNamespace() if sleeps is None else SimpleNamespace(enable_sleep_mode=sleeps)
    assert stays_finite(SimpleNamespace(model_config=model), stored) is stays
