"""Linear layers on a CPU with AMX, whose weights lie as oneDNN multiplies by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attn_core.selection.result import Selection
from attn_core.spec.device import probe_cpu

_ROWS = 512  # the order is chosen for products of so many rows; fewer take it as well
Replaced = list[tuple[nn.Module, str, nn.Linear]]  # the parent, the name in it, what was there


class PackedLinear(nn.Module):
    """A linear layer in bf16 for inference: what nn.Linear computes, from packed weights.

    torch's own product of plain bf16 weights copies them into this order in every call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = linear.bias
        with torch.inference_mode(False), torch.no_grad():
            self._weight = _in_order(linear.weight)
            self._bias = None if bias is None else bias.detach().clone()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weights, for models that look at them."""
        plain: Tensor = self._weight.to_dense()
        return plain

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save what nn.Linear saves."""
        destination[prefix + "weight"] = self.weight
        if self._bias is not None:
            destination[prefix + "bias"] = self._bias

    def __getstate__(self) -> dict[str, Any]:
        """Return plain weights: packed ones can be neither copied nor pickled."""
        return {name: x for name, x in vars(self).items() if name != "_multiply"} | {
            "_weight": self.weight
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._weight = _in_order(state["_weight"])
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in_features] times the weights, plus the bias."""
        result: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return result


def _in_order(weight: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        order: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return order


def packed(model: Any, selection: Selection) -> Any:
    """Return a model itself, its linear layers packed where attention reads none of their weights.

    MLA reads some, and so do linear layers of attention.
    """
    kinds = {choice.row.kind for choice in selection.roles.values()}
    if kinds == {"mha"} and _gains():
        parents = [x for x in model.modules() if not isinstance(x, nn.Linear)]
        for parent in reversed(parents):  # part by part, so that plain weights go meanwhile
            _pack(parent)
    return model


def pack_linear(model: Any) -> Replaced:
    """Replace a model's linear layers in bf16 by packed ones, where this CPU has AMX.

    The plain weights go with what is returned, and only tied ones stay; `unpack_linear` puts the
    layers back. Layers of other classes, as adapters' are, stay. Returns nothing where nothing is
    gained: on other devices and in other dtypes.
    """
    return _pack(model) if _gains() else []


def _pack(model: Any) -> Replaced:
    replaced = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and "forward" not in vars(layer) and _packs(layer)
    ]
    made: dict[nn.Linear, PackedLinear] = {}  # a layer may have several parents
    for parent, name, layer in replaced:
        if layer not in made:
            made[layer] = PackedLinear(layer)
        setattr(parent, name, made[layer])
    return replaced


def unpack_linear(replaced: Replaced) -> None:
    """Put the layers back that pack_linear has replaced."""
    for parent, name, layer in replaced:
        setattr(parent, name, layer)


def _gains() -> bool:
    mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    mkldnn = mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return mkldnn and probe_cpu().arch == "amx"


def _packs(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.numel() > 0
