"""SGLang's linear layers as attn-core's, and the short convolution in front of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.server import NAME, names_linear, serves_linear
from attn_core.runtime.linear import Gate, LinearLayer

QK_NORM = 1e-6  # SGLang's kernels take no other


def served_layers(runner: Any) -> dict[int, LinearLayer]:
    """Return the GDN or KDA layers of a runner's model that attn-core serves, by their number.

    Raises UnsupportedError where attn-core is named for layers of another kind.
    """
    args = runner.server_args
    if runner.is_draft_worker or not serves_linear(args):
        return {}  # a draft model runs softmax attention alone
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    modules = (m for m in runner.model.modules() if isinstance(m, RadixLinearAttention))
    layers = {module.layer_id: to_linear_layer(module) for module in modules}
    if not layers and names_linear(args):
        raise UnsupportedError(
            f"--linear-attn-backend {NAME} for a model without GDN or KDA layers "
            "(RadixLinearAttention); leave the argument out"
        )
    return layers


def to_linear_layer(module: Any) -> LinearLayer:
    """Return the LinearLayer of a RadixLinearAttention, whose heads are this rank's."""
    heads, k_dim = module.num_v_heads, module.head_k_dim
    bias = module.dt_bias.detach()
    per_channel = bias.numel() > heads
    return LinearLayer(
        layer_id=module.layer_id,
        kind="kda" if per_channel else "gdn",
        num_k_heads=module.num_k_heads,
        num_v_heads=heads,
        head_k_dim=k_dim,
        head_v_dim=module.head_v_dim,
        qk_norm=QK_NORM,
        gate=Gate(
            A_log=module.A_log.detach().view(heads),
            dt_bias=bias.view(heads, k_dim) if per_channel else bias.view(heads),
            lower_bound=getattr(module, "lower_bound", None),
        ),
    )


class ShortConvolution:
    """SGLang's own kernels over its own states, [slots, channels, width - 1].

    kind: "gdn" or "kda", whose states SGLang keeps as [slots, width - 1, channels].
    """

    def __init__(self, kind: str) -> None:
        self.is_kda = kind == "kda"
        # the kernels of the platform are attributes of SGLang's module
        name = "kda_backend" if self.is_kda else "gdn_backend"
        self._kernels = importlib.import_module(f"sglang.srt.layers.attention.linear.{name}")

    def states(self, x: Tensor) -> Tensor:
        """Return [..., channels, width - 1] of SGLang's states."""
        return x.transpose(-1, -2) if self.is_kda else x

    def _arguments(self, module: Any) -> tuple[Tensor, Tensor | None, str]:
        return module.conv_weights, module.bias, "silu" if self.is_kda else module.activation

    def decode(self, x: Tensor, module: Any, cache: Any, slots: Tensor) -> Tensor:
        """Convolve one token of each request, x [B, channels] → the same."""
        weights, bias, activation = self._arguments(module)
        result: Tensor = self._kernels.causal_conv1d_update(
            x, self.states(cache.conv[0]), weights, bias, activation, conv_state_indices=slots
        )
        return result

    def extend(
        self, x: Tensor, module: Any, cache: Any, forward_batch: Any, metadata: Any
    ) -> Tensor:
        """Convolve new tokens, x [T, channels] → the same, and keep the inputs of checkpoints."""
        states = self.states(cache.conv[0])
        if metadata.has_mamba_track_mask:
            inputs = x[metadata.track_conv_indices]  # [N, width - 1, channels]
            states[metadata.conv_states_mask_indices] = inputs.transpose(1, 2)
        weights, bias, activation = self._arguments(module)
        result: Tensor = self._kernels.causal_conv1d_fn(
            x.transpose(0, 1),
            weights,
            bias,
            activation=activation,
            conv_states=states,
            has_initial_state=forward_batch.extend_prefix_lens > 0,
            cache_indices=metadata.mamba_cache_indices,
            query_start_loc=metadata.query_start_loc,
            seq_lens_cpu=forward_batch.extend_seq_lens_cpu,
        )
        return result.transpose(0, 1)

    def verify(
        self, x: Tensor, module: Any, cache: Any, drafts: int, metadata: Any, rows: Tensor
    ) -> Tensor:
        """Convolve drafts, x [B · n, channels] → the same; each leaves a window in its row."""
        weights, bias, activation = self._arguments(module)
        requests = x.shape[0] // drafts
        result: Tensor = self._kernels.causal_conv1d_update(
            x.view(requests, drafts, -1).transpose(1, 2),
            self.states(cache.conv[0]),
            weights,
            bias,
            activation,
            conv_state_indices=metadata.mamba_cache_indices[:requests],
            intermediate_conv_window=self.states(cache.intermediate_conv_window[0]),
            intermediate_state_indices=rows[:requests],
            retrieve_next_token=metadata.retrieve_next_token,
            retrieve_next_sibling=metadata.retrieve_next_sibling,
            retrieve_parent_token=metadata.retrieve_parent_token,
        )
        return result.transpose(1, 2).reshape(x.shape)


def raw_gates(
    layer: LinearLayer, a: Tensor, b: Tensor, dtype: torch.dtype, *, decodes: bool
) -> tuple[Tensor, Tensor]:
    """Return the raw gates f [T, Hv] or [T, Hv, K] and b [T, Hv] of SGLang's a and b.

    A model of KDA layers applies the sigmoid of b itself, except in decode; this is undone.
    """
    b = b.view(-1, layer.num_v_heads)
    if layer.kind == "kda" and not decodes:
        b = b.float().logit().to(dtype)
    return a.reshape(-1, *layer.g_dims), b
