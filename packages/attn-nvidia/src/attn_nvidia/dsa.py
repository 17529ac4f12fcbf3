"""Which kernels serve sparse MLA (DSA): the documented rules, as pure functions of their inputs.

select() does not read them: they are for an engine, and for the backend nsa, which serves those of
sm90.
Source: SGLang's DSA backend (srt/layers/attention/dsa_backend.py, srt/arg_groups/overrides.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attn_core import Device, UsageError

if TYPE_CHECKING:
    from attn_core import ForwardMode

Store = Literal["bf16", "fp8_e4m3"]
FlashMLA = Literal["flashmla_sparse", "flashmla_kv"]
SPARSE_RATIO = 512  # KV tokens a query token, above which the gathered path stops paying


@dataclass(frozen=True)
class SubBackends:
    """The kernels of sparse MLA, per phase."""

    prefill: str
    decode: str

    def of(self, mode: ForwardMode) -> str:
        """Return the kernel of a forward pass: verify and draft extend are decode's."""
        return self.prefill if mode.value in ("extend", "mixed") else self.decode


def store_dtype(device: Device, dtype: str = "auto", *, sinks: bool = False) -> Store:
    """Return what the latent cache stores: FP8 from compute capability 10 on, else bf16.

    Learnable sinks need bf16. Raises UsageError for another dtype, or FP8 asked with sinks.
    """
    if dtype == "auto":
        return "bf16" if sinks or _capability(device) < 100 else "fp8_e4m3"
    if dtype == "fp8_e4m3" and not sinks:
        return "fp8_e4m3"
    if dtype == "bf16":
        return "bf16"
    supported = "bf16, for a model with sinks" if sinks else "auto, bf16, fp8_e4m3"
    raise UsageError(f"--kv-cache-dtype {dtype}: sparse MLA stores {supported}")


def sub_backends(
    device: Device, store: Store, *, sinks: bool = False, glm: bool = False
) -> SubBackends:
    """Return the documented default kernels for a device and a store.

    The documented system has them on more devices than the rows of nsa declare, which are for sm90:
    an answer for another device says nothing about what can be selected there.
    glm: the model is of the GLM family, which has a kernel of its own on sm120.
    """
    if device.type == "xpu":
        return SubBackends("intel_xpu", "intel_xpu")
    if sinks:
        return SubBackends("flashmla_sparse", "flashmla_sparse")
    if device.type == "rocm":
        return SubBackends("triton", "triton")
    if device.type != "cuda":
        raise UsageError(f"sparse MLA has no kernels on {device}: use cuda, rocm or xpu")
    capability = _capability(device)
    if glm and capability // 10 == 12 and store == "fp8_e4m3":
        return SubBackends("flashinfer_sparse_mla", "flashinfer_sparse_mla")
    if store == "fp8_e4m3":
        default = "trtllm" if capability >= 100 else "flashmla_kv"
        return SubBackends(default, default)
    return SubBackends("flashmla_sparse", "trtllm" if capability >= 100 else "fa3")


def sparse_or_kv(total_kv_tokens: int, total_q_tokens: int) -> FlashMLA:
    """Choose between FlashMLA's gathered and paged kernels from a batch's token counts.

    Below 512 KV tokens a query token, gathering the selected tokens once is cheaper.
    """
    few_keys = total_kv_tokens < SPARSE_RATIO * total_q_tokens
    return "flashmla_sparse" if few_keys else "flashmla_kv"


def flashmla_auto(
    device: Device, store: Store, mode: ForwardMode, total_kv_tokens: int, total_q_tokens: int
) -> FlashMLA:
    """Resolve the sub-backend "flashmla_auto" for one pass.

    A bf16 cache is always gathered. An FP8 cache follows `sparse_or_kv` where Blackwell extends,
    and is read in place everywhere else.
    """
    if store == "bf16":
        return "flashmla_sparse"
    if _capability(device) >= 100 and mode.value == "extend":
        return sparse_or_kv(total_kv_tokens, total_q_tokens)
    return "flashmla_kv"


def _capability(device: Device) -> int:
    """Return 90 for cuda:sm90; 0 where the device has no compute capability."""
    arch = device.arch or ""
    return int(arch[2:]) if device.type == "cuda" and arch[2:].isdigit() else 0
