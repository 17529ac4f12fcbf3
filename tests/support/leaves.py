"""The compiled ops of the wheels: their schemas as text, and as torch ops on a CPU."""

from __future__ import annotations

import contextlib
import mmap
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from wheels import CONTRACTS, folders, pinned

_LONGEST = 4096  # bytes of a schema


@dataclass(frozen=True, kw_only=True)
class Library:
    """A shared library of a wheel: where it lies, torch's name of it, and which ops are called."""

    distribution: str
    path: str
    namespace: str
    ops: tuple[str, ...]

    @property
    def recorded(self) -> pathlib.Path:
        """The file of its schemas, one a line, with the wheel's version in its name."""
        stem = pathlib.Path(self.path).name.partition(".")[0]
        return (
            CONTRACTS / "schemas" / f"{self.distribution}-{pinned()[self.distribution]}-{stem}.txt"
        )

    def binary(self) -> pathlib.Path | None:
        """Return the shared library itself, None where its wheel is not here."""
        return next((p for f in folders() if (p := f / self.path).is_file()), None)


LIBRARIES = (
    Library(
        distribution="sglang-kernel",
        path="sgl_kernel/flash_ops.abi3.so",
        namespace="sgl_kernel",
        ops=("fwd", "get_scheduler_metadata"),
    ),
    Library(
        distribution="sglang-kernel",
        path="sgl_kernel/flashmla_ops.abi3.so",
        namespace="sgl_kernel",
        ops=(
            "dense_decode_fwd",
            "fwd_kvcache_mla",
            "fwd_kvcache_mla_fp8",
            "get_mla_decoding_metadata",
            "get_mla_decoding_metadata_dense_fp8",
            "sparse_decode_fwd",
            "sparse_prefill_fwd",
        ),
    ),
    Library(
        distribution="sglang-kernel",
        path="sgl_kernel/sm90/common_ops.abi3.so",
        namespace="sgl_kernel",
        ops=("cutlass_mla_decode", "merge_state_v2"),
    ),
    Library(
        distribution="sgl-flash-mla",
        path="flash_mla/_C_legacy.abi3.so",
        namespace="flash_mla_legacy",
        ops=(
            "dense_decode_fwd",
            "fwd_kvcache_mla_fp8",
            "get_mla_decoding_metadata",
            "get_mla_decoding_metadata_dense_fp8",
            "sparse_decode_fwd",
            "sparse_prefill_fwd",
        ),
    ),
    Library(
        distribution="torch-npu",
        path="torch_npu/lib/libtorch_npu.so",
        namespace="npu",
        ops=(
            "_npu_fused_infer_attention_score_v2_get_max_workspace",
            "_npu_fused_infer_attention_score_v2_infer_output",
            "npu_attention_update",
            "npu_chunk_gated_delta_rule",
            "npu_fused_infer_attention_score_v2",
            "npu_fused_infer_attention_score_v2.out",
            "npu_lightning_indexer",
            "npu_recurrent_gated_delta_rule",
            "npu_scatter_pa_kv_cache",
            "npu_sparse_flash_attention",
        ),
    ),
    Library(
        distribution="vllm-xpu-kernels",
        path="vllm_xpu_kernels/_vllm_fa2_C.abi3.so",
        namespace="_vllm_fa2_C",
        ops=("varlen_fwd",),
    ),
)

# torch infers it from the C++ function, so that no text of it is in the library
INFERRED = {
    "cutlass_mla_get_workspace_size": "cutlass_mla_get_workspace_size(int max_seq_len, "
    "int num_batches, int sm_count, int num_kv_splits) -> int"
}


def extract(path: pathlib.Path, ops: tuple[str, ...]) -> dict[str, str]:
    """Read the schemas of these ops out of a shared library, where each is a text of its own."""
    result = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name in ops:
            start, at = f"\0{name}(".encode(), -1
            while (at := data.find(start, at + 1)) >= 0:
                text = data[at + 1 : at + _LONGEST].split(b"\0")[0].decode("ascii", "replace")
                with contextlib.suppress(RuntimeError):  # a message that begins like one
                    torch._C.parse_schema(text)
                    result[name] = " ".join(text.split())
    return result


def read(library: Library) -> dict[str, str]:
    """Return op → schema, as recorded."""
    lines = library.recorded.read_text().splitlines()
    return {line.partition("(")[0]: line for line in lines if line}


@contextlib.contextmanager
def defined(
    namespace: str, schemas: Mapping[str, str], leaves: Mapping[str, Callable[..., object]]
) -> Iterator[dict[str, int]]:
    """Define torch ops with these schemas for a while, emulated on the CPU by `leaves`.

    A wrapper that calls one with a wrong number, order or type of arguments is refused by torch.
    Yields op → number of calls.
    """
    calls = dict.fromkeys(leaves, 0)
    library = torch.library.Library(namespace, "FRAGMENT")

    def counted(name: str, leaf: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            calls[name] += 1
            return leaf(*args, **more)

        return call

    try:
        for name, leaf in leaves.items():
            library.define(schemas[name])
            library.impl(name, counted(name, leaf), "CompositeExplicitAutograd")
        yield calls
    finally:
        library._destroy()


if __name__ == "__main__":  # record what the wheels of ATTN_WHEELS have
    for each in LIBRARIES:
        binary = each.binary()
        if binary is None:
            raise SystemExit(f"{each.path} is in no folder of ATTN_WHEELS")
        lines = [line for _, line in sorted(extract(binary, each.ops).items())]
        each.recorded.write_text("\n".join(lines) + "\n")
        print(each.recorded.name, len(lines), "of", len(each.ops))
