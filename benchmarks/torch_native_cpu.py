"""Time torch_native on this CPU, gather included, beside one SDPA call on K and V already gathered.

Run: python benchmarks/torch_native_cpu.py [--output FILE.json] [--repeats N]
On a machine with many cores: OMP_NUM_THREADS=2 taskset -c 0,1 python benchmarks/…
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.memory import zeros
from attn_core.runtime.backend import AttentionBackend, BackendConfig
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.capabilities import Capabilities
from torch import Tensor

RESULTS = pathlib.Path(__file__).parent / "results"
TARGET = 1.3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CAPS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # the instructions of torch's products
PAGE_SIZES = (1, 16, 64)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """B requests of the same length: a decode step each, or a whole causal prefill."""

    name: str
    batch: int
    length: int
    decode: bool
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"


SHAPES = (
    Shape(name="decode", batch=8, length=4096, decode=True),
    Shape(name="prefill", batch=1, length=2048, decode=False),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """K and V [B, Hkv, L, D] gathered, and q [B, Hq, Lq, D]; all in the shape's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor


def draw(shape: Shape) -> Data:
    queries, dtype = 1 if shape.decode else shape.length, DTYPES[shape.dtype]
    kv = (shape.batch, shape.kv_heads, shape.length, shape.head_dim)
    return Data(
        q=torch.randn(shape.batch, shape.q_heads, queries, shape.head_dim, dtype=dtype),
        k=torch.randn(kv, dtype=dtype),
        v=torch.randn(kv, dtype=dtype),
    )


def sdpa(shape: Shape, data: Data) -> Tensor:
    return F.scaled_dot_product_attention(
        data.q, data.k, data.v, is_causal=not shape.decode, enable_gqa=True
    )


def sdpa_folded(data: Data) -> Tensor:
    """The same decode with the q heads of a kv head as its rows: the best that SDPA alone does."""
    rows = data.q.view(data.q.shape[0], data.k.shape[1], -1, data.q.shape[-1])
    return F.scaled_dot_product_attention(rows, data.k, data.v)


def paged(
    shape: Shape,
    data: Data,
    page_size: int,
    create: Callable[[BackendConfig], AttentionBackend] = TorchNative,
    *,
    shuffled: bool = True,
) -> tuple[Callable[[], Tensor], float]:
    """A call of a backend over a pool that holds `data`, and its plan's seconds.

    shuffled: its pages lie in a random order, else in that of the tokens, as in a fresh pool.
    """
    per_request = shape.length // page_size
    pages = shape.batch * per_request
    order = torch.randperm(pages) if shuffled else torch.arange(pages)
    table = (order + 1).view(shape.batch, per_request).int()

    def pool(x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).reshape(pages, page_size, shape.kv_heads, shape.head_dim)
        out = zeros((pages + 1, *rows.shape[1:]), x.dtype, "cpu").fill_(torch.nan)
        out[table.flatten().long()] = rows
        return out

    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
    )
    dtypes = {shape.dtype}
    row = Capabilities(kind="mha", device="any", dtypes=dtypes, kv_dtypes=dtypes, priority=0)
    config = BackendConfig(
        name="torch_native",
        row=row,
        layers=(layer,),
        page_size=page_size,
        dtype=shape.dtype,
        kv_cache_dtype=shape.dtype,
        device=torch.device("cpu"),
    )
    backend, cache = create(config), LayerCache(k=pool(data.k), v=pool(data.v))
    batch = ForwardBatch.build(
        ForwardMode.DECODE if shape.decode else ForwardMode.EXTEND,
        query_lens=[1 if shape.decode else shape.length] * shape.batch,
        seq_lens=[shape.length] * shape.batch,
        page_table=table,
        page_size=page_size,
    )
    start = time.perf_counter()
    metadata = backend.init_forward_metadata(batch)
    planned = time.perf_counter() - start
    q = data.q.transpose(1, 2).flatten(0, 1).contiguous()
    out = torch.empty_like(q)

    def call() -> Tensor:
        actual = backend.forward(q, None, None, layer, cache, batch, metadata, out=out)
        assert isinstance(actual, Tensor)
        return actual

    return call, planned


def truth(shape: Shape, data: Data) -> Tensor:
    """The same attention in float64, [B, Hq, Lq, D]."""
    group = shape.q_heads // shape.kv_heads
    outs = []
    for h in range(shape.q_heads):
        k, v = data.k[:, h // group].double(), data.v[:, h // group].double()
        scores = data.q[:, h].double() @ k.mT * shape.head_dim**-0.5
        if not shape.decode:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores.masked_fill_(hidden, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return torch.stack(outs, 1)


def check(name: str, got: Tensor, reference: Tensor, want: Tensor) -> float:
    """Return the largest error; raise where it is over twice SDPA's own plus two roundings."""
    error = (got.double() - want).abs().max().item()
    allowed = 2 * (reference.double() - want).abs().max().item()
    allowed += 2 * torch.finfo(got.dtype).eps * want.abs().max().item()
    if not error <= allowed:
        raise SystemExit(f"{name}: error {error:.2e} is over {allowed:.2e}; nothing was timed")
    return error


def interleave(calls: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns so that a busy machine slows all of them alike.

    With one thread it is this thread's own time, of which others' turns on its core are no part.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def measure(shape: Shape, repeats: int) -> dict[str, object]:
    data = draw(shape)
    want, reference = truth(shape, data), sdpa(shape, data)
    calls: dict[str, Callable[[], Tensor]] = {"sdpa": lambda: sdpa(shape, data)}
    if shape.decode:
        calls["sdpa_folded"] = lambda: sdpa_folded(data)
    plans, errors = {}, {}
    for page_size in PAGE_SIZES:
        name = f"torch_native page {page_size}"
        call, planned = paged(shape, data, page_size)
        rows = call().view(shape.batch, -1, shape.q_heads, shape.head_dim).transpose(1, 2)
        errors[name] = check(f"{shape.name}, {name}", rows, reference, want)
        calls[name], plans[name] = call, planned * 1e3
    for call in calls.values():
        call()
    median = {k: statistics.median(v) * 1e3 for k, v in interleave(calls, repeats).items()}
    return {
        "shape": asdict(shape),
        "dtype": shape.dtype,
        "repeats": repeats,
        "median_ms": median,
        "ratio_to_sdpa": {k: median[k] / median["sdpa"] for k in plans},
        "plan_ms_once_per_pass": plans,
        "largest_error": {"sdpa": (reference.double() - want).abs().max().item(), **errors},
    }


def cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def placement() -> dict[str, object]:
    """Say how many of the machine's cores the process may use, and what torch's libraries may."""
    cores = {"cores_usable": len(os.sched_getaffinity(0)), "cores": os.cpu_count()}
    return {**cores, "capped_by": {x: os.environ[x] for x in CAPS if x in os.environ}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    capability = "amx" if amx else torch.backends.cpu.get_cpu_capability().lower()
    output = RESULTS / f"torch_native_cpu.{capability}.json"
    parser.add_argument("--output", type=pathlib.Path, default=output)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        results = [measure(shape, args.repeats) for shape in SHAPES]
    report = {
        "benchmark": "torch_native_cpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cpu_capability": capability,
        "threads": torch.get_num_threads(),
        "target_ratio": TARGET,
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
