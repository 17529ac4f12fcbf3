"""Time torch_native's linear attention on this CPU beside the torch functions of transformers.

Run: python -m benchmarks.linear_cpu [--output FILE.json] [--repeats N]
Both take q and k before their norm in bf16 and compute in float32, as models call them. Ours reads
and writes a pool of states in float32; transformers' takes and returns tensors of its own.
GB/s: q, k, v, g, beta and the states are read, and the outputs and the states written, once each,
so much in a call's time; what a call reads and writes besides is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import transformers
from attn_core import (
    BackendConfig,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    LinearLayer,
    StatePool,
)
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.testing.linear_oracle import delta_rule
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from benchmarks.torch_native_cpu import RESULTS, cpu_model, interleave

PEERS = {
    ("gdn", True): qwen.torch_recurrent_gated_delta_rule,
    ("gdn", False): qwen.torch_chunk_gated_delta_rule,
}
if find_spec("transformers.models.kimi_linear"):  # older versions have no KDA: it is left out
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    PEERS |= {
        ("kda", True): kimi.recurrent_kimi_delta_attention,
        ("kda", False): kimi.chunk_kimi_delta_attention,
    }
TARGET = 3.0  # times as fast as transformers
RATIO = 5e-3  # of the RMS error to the RMS of the output, in bf16
PIECE = 64  # tokens that the reference keeps the states of


@dataclass(frozen=True, kw_only=True)
class Shape:
    """B requests: a decode step each, or a prompt of `length` tokens."""

    name: str
    batch: int
    length: int = 1
    kind: Literal["gdn", "kda"] = "gdn"
    key_heads: int = 16
    value_heads: int = 32
    head_dim: int = 128

    @property
    def decode(self) -> bool:
        return self.length == 1


SHAPES = (
    Shape(name="decode", batch=8),
    Shape(name="decode, one request", batch=1),
    Shape(name="prefill", batch=1, length=2048),
    Shape(name="decode", kind="kda", batch=8, key_heads=32),
    Shape(name="prefill", kind="kda", batch=1, length=256, key_heads=32),
)


class Data(NamedTuple):
    """q, k, v, g, beta of all tokens, and states [B, Hv, V, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    states: Tensor


def draw(shape: Shape, layer: LinearLayer) -> Data:
    t, d = shape.batch * shape.length, shape.head_dim
    q, k = (torch.randn(t, shape.key_heads, d).bfloat16() for _ in range(2))
    v = torch.randn(t, shape.value_heads, d).bfloat16()
    g, beta = -torch.rand(t, *layer.g_dims), torch.rand(t, shape.value_heads)
    return Data(q, k, v, g, beta, torch.randn(shape.batch, shape.value_heads, d, d))


def ours(shape: Shape, layer: LinearLayer, data: Data) -> Callable[[], Tensor]:
    q, k, v, g, beta, states = data
    row = Capabilities(
        kind=layer.kind, device="cpu", dtypes={"bf16"}, kv_dtypes={"fp32"}, priority=0
    )
    config = BackendConfig(
        name="torch_native",
        row=row,
        layers=(),
        linear_layers=(layer,),
        page_size=1,
        dtype="bf16",
        kv_cache_dtype="fp32",
        device=torch.device("cpu"),
    )
    backend, pool = TorchNativeLinear(config), StatePool([layer], num_slots=shape.batch + 1)
    slots = torch.randperm(shape.batch) + 1
    batch = ForwardBatch.build(
        ForwardMode.DECODE if shape.decode else ForwardMode.EXTEND,
        query_lens=[shape.length] * shape.batch,
        seq_lens=[shape.length] * shape.batch,
        page_table=torch.zeros(shape.batch, shape.length, dtype=torch.int32),
        page_size=1,
        state_slots=slots.int(),
    )
    metadata = backend.init_forward_metadata(batch)
    run = backend.decode if shape.decode else backend.extend
    pool.states.state[0, slots] = states

    def call() -> Tensor:
        return run(q, k, v, g, beta, layer, pool.layer(0), batch, metadata)

    return call


def theirs(shape: Shape, data: Data) -> Callable[[], Tensor]:
    *inputs, states = data
    function: Any = PEERS[shape.kind, shape.decode]
    function = getattr(function, "__wrapped__", function)  # not kernels that are installed
    q, k, v, g, beta = (torch.unflatten(x, 0, (shape.batch, shape.length)) for x in inputs)
    q, k = (x.repeat_interleave(shape.value_heads // shape.key_heads, 2) for x in (q, k))
    start = states.mT.contiguous()  # K-major

    def call() -> Tensor:
        out: Tensor = function(
            q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip
        return out.flatten(0, 1)

    return call


def truth(shape: Shape, layer: LinearLayer, data: Data) -> Tensor:
    """The recurrence in float64, [T, Hv, V]."""
    outs = []
    for request, state in enumerate(data.states):
        after = state
        for first in range(0, shape.length, PIECE):
            start = request * shape.length
            piece = slice(start + first, start + min(first + PIECE, shape.length))
            q, k, v, g, beta = (x[piece] for x in data[:5])
            out, states = delta_rule(q, k, v, g, beta, layer, after)
            after = states[-1]
            outs.append(out)
    return torch.cat(outs)


def moved(data: Data, out: Tensor) -> int:
    """Return the bytes that a call has to read and to write at least."""
    return sum(x.nbytes for x in data) + out.nbytes + data.states.nbytes


def check(name: str, result: Tensor, wanted: Tensor) -> float:
    """Return the ratio of the error; raise where it is over what bf16 explains."""
    ratio = float((result.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    if not ratio <= RATIO:
        raise SystemExit(f"{name}: error ratio {ratio:.2e} is over {RATIO}; nothing was timed")
    return ratio


def measure(shape: Shape, repeats: int) -> dict[str, object]:
    d = shape.head_dim
    layer = LinearLayer(
        layer_id=0,
        kind=shape.kind,
        num_k_heads=shape.key_heads,
        num_v_heads=shape.value_heads,
        head_k_dim=d,
        head_v_dim=d,
        qk_norm=1e-6,
    )
    data = draw(shape, layer)
    wanted = truth(shape, layer, data)
    calls = {"torch_native": ours(shape, layer, data), "transformers": theirs(shape, data)}
    outs = {n: call() for n, call in calls.items()}
    errors = {n: check(f"{shape.name}, {n}", out, wanted) for n, out in outs.items()}
    median = {k: statistics.median(v) * 1e3 for k, v in interleave(calls, repeats).items()}
    return {
        "shape": asdict(shape),
        "dtype": "bf16, states fp32",
        "repeats": repeats,
        "median_ms": median,
        "gb_per_s": {n: moved(data, outs[n]) / median[n] / 1e6 for n in calls},
        "times_as_fast": median["transformers"] / median["torch_native"],
        "error_ratio": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    capability = "amx" if amx else torch.backends.cpu.get_cpu_capability().lower()
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS / f"linear_cpu.{capability}.json"
    )
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        timed = [shape for shape in SHAPES if (shape.kind, shape.decode) in PEERS]
        results = [measure(shape, args.repeats) for shape in timed]
    report = {
        "benchmark": "linear_cpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cpu_capability": capability,
        "threads": torch.get_num_threads(),
        "target_times_as_fast": TARGET,
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
