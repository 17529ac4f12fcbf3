"""What a call's tensors were found to be, so that those of the pass's other layers are compared."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attn_core.ops.forms import Fits, form_of, same_form


class Known(NamedTuple):
    """Tensors of a call that fit their layer and their pass.

    fits: says whether others are like them. slots: where new tokens are written, None for nowhere.
    tokens: how many. form: of what is written, see attn_core.ops.kv.write_kv; -1 for nothing.
    """

    fits: Fits
    slots: Tensor | None
    tokens: int
    form: int

    @classmethod
    def of(
        cls, tensors: list[Tensor], written: tuple[Tensor | None, ...], slots: Tensor | None
    ) -> Known:
        """Return it for a call. written: those of the tensors that are written to the slots."""
        fits, tokens = same_form(*tensors), 0 if slots is None else slots.shape[0]
        if slots is None or not tokens:
            return cls(fits, slots, 0, -1)
        return cls(fits, slots, tokens, form_of(*written, slots))
