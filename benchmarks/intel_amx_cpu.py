"""Time intel_amx on this CPU beside torch_native, and beside SDPA on K and V already gathered.

Run: python -m benchmarks.intel_amx_cpu [--output FILE.json] [--repeats N] [--level NAME]
[--dtypes bf16 fp32]
[--cores 1 2 4 8]: time the same calls with each number of threads, into a record of their own.
[--against KERNELS.so]: time these compiled kernels, of another version, instead of torch_native.
A CPU with AMX stands for one without by `--level avx512_bf16`, for our kernels, and for torch's by
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E3 in the environment, both.
The calls of all contestants take turns, so that a busy machine slows all of them alike. With one
thread (OMP_NUM_THREADS=1) the thread's own time is taken, for which a busy machine counts little.
Pages lie in a random order, those of one token in decode also in the order of the tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.memory import zeros
from attn_core.runtime.backend import AttentionBackend, BackendConfig
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.capabilities import Capabilities
from attn_intel.cpu.backend import IntelAMX
from attn_intel.cpu.library import LEVELS, Kernels, load
from torch import Tensor

from benchmarks.torch_native_cpu import (
    DTYPES,
    SHAPES,
    Shape,
    check,
    cpu_model,
    draw,
    interleave,
    paged,
    placement,
    sdpa,
    sdpa_folded,
    truth,
)

RESULTS = pathlib.Path(__file__).parent / "results"
PAGE_SIZES = (1, 16, 128)
CONTESTANTS: dict[str, Callable[[BackendConfig], AttentionBackend]] = {
    "torch_native": TorchNative,
    "intel_amx": IntelAMX,
}
ONE = Shape(name="decode of one request", batch=1, length=16384, decode=True)
LATENT, ROPE, PAGE = 512, 64, 16
MLA = (  # requests, keys, heads
    (8, 4096, 16),
    (1, 16384, 16),
    (8, 2048, 128),
)


def summary(calls: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, object]:
    """Medians in milliseconds, and how many times faster than SDPA each call is."""
    for call in calls.values():
        call()
    median = {k: statistics.median(v) * 1e3 for k, v in interleave(calls, repeats).items()}
    faster = {k: median["sdpa"] / v for k, v in median.items() if k != "sdpa"}
    return {"repeats": repeats, "median_ms": median, "times_faster_than_sdpa": faster}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape: what is timed, and the largest error of each against float64."""

    shape: dict[str, object]
    calls: dict[str, Callable[[], Tensor]]
    errors: dict[str, float]

    def measure(self, repeats: int) -> dict[str, object]:
        timed = summary(self.calls, repeats)
        return {"shape": self.shape, **timed, "largest_error": self.errors}


def attention_case(shape: Shape, page_sizes: Sequence[int] = PAGE_SIZES) -> Case:
    """Prepare one shape of MHA, and compare each result with float64."""
    data = draw(shape)
    want, reference = truth(shape, data), sdpa(shape, data)
    calls: dict[str, Callable[[], Tensor]] = {"sdpa": lambda: sdpa(shape, data)}
    if shape.decode:
        calls["sdpa_folded"] = lambda: sdpa_folded(data)
    errors = {"sdpa": (reference.double() - want).abs().max().item()}
    orders = [(page_size, True) for page_size in page_sizes]
    orders += [(1, False)] if shape.decode and 1 in page_sizes else []
    for backend, create in CONTESTANTS.items():
        for page_size, shuffled in orders:
            name = f"{backend} page {page_size}{'' if shuffled else ' in order'}"
            call, _ = paged(shape, data, page_size, create, shuffled=shuffled)
            rows = call().view(shape.batch, -1, shape.q_heads, shape.head_dim).transpose(1, 2)
            errors[name] = check(f"{shape.name}, {name}", rows, reference, want)
            calls[name] = call
    return Case(shape=asdict(shape), calls=calls, errors=errors)


def mla_case(batch: int, length: int, heads: int, dtype: str = "bf16") -> Case:
    """Prepare absorbed MLA decode beside SDPA on gathered latents, whose heads are its rows.

    SDPA takes the whole latent as its values, the fastest form it has: with 512 of 576 columns it
    leaves its flash kernel.
    """
    dim, scale = LATENT + ROPE, 192**-0.5
    q = torch.randn(batch, heads, dim, dtype=DTYPES[dtype])
    latents = torch.randn(batch, 1, length, dim, dtype=DTYPES[dtype])
    pages = batch * length // PAGE
    table = (torch.randperm(pages) + 1).view(batch, -1).int()
    pool = zeros((pages + 1, PAGE, 1, dim), DTYPES[dtype], "cpu").fill_(torch.nan)
    pool[table.flatten().long()] = latents.reshape(pages, PAGE, 1, dim)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=heads, num_kv_heads=1, head_dim=dim, v_head_dim=LATENT, scale=scale
    )
    batch_of = ForwardBatch.build(
        ForwardMode.DECODE,
        query_lens=[1] * batch,
        seq_lens=[length] * batch,
        page_table=table,
        page_size=PAGE,
    )

    def gathered() -> Tensor:
        out = F.scaled_dot_product_attention(q[:, None], latents, latents, scale=scale)
        return out[:, 0, :, :LATENT]

    scores = q.double() @ latents[:, 0].double().mT * scale
    want, reference = scores.softmax(-1) @ latents[:, 0, :, :LATENT].double(), gathered()
    calls: dict[str, Callable[[], Tensor]] = {"sdpa": gathered}
    errors = {"sdpa": (reference.double() - want).abs().max().item()}
    for name, create in CONTESTANTS.items():
        cache = LayerCache(k=pool, v=None)
        calls[name] = _mla_call(name, create, layer, cache, batch_of, q, dtype)
        errors[name] = check(f"mla, {name}", calls[name](), reference, want)
    shape = {"batch": batch, "length": length, "heads": heads, "page": PAGE, "dtype": dtype}
    return Case(shape={"name": "mla decode", **shape}, calls=calls, errors=errors)


def of_library(path: pathlib.Path) -> Callable[[BackendConfig], AttentionBackend]:
    """Return what creates intel_amx over another compiled library with the same interface."""
    kernels = Kernels(str(path))

    class Other(IntelAMX):
        def __init__(self, config: BackendConfig) -> None:
            super().__init__(config)
            self._kernels = kernels

    return Other


def cases(dtypes: Sequence[str], page_sizes: Sequence[int] = PAGE_SIZES) -> Iterator[Case]:
    """Prepare all shapes in each dtype, one when it is asked for."""
    for dtype in dtypes:
        for shape in (*SHAPES, ONE):
            yield attention_case(replace(shape, dtype=dtype), page_sizes)
        for mla in MLA:
            yield mla_case(*mla, dtype)


def scaling(
    cores: Sequence[int], repeats: int, dtypes: Sequence[str] = ("bf16",)
) -> list[dict[str, object]]:
    """Time intel_amx and SDPA with each number of threads: one page size, the same tensors."""
    prepared = list(cases(dtypes, [PAGE]))
    results = []
    for threads in cores:
        torch.set_num_threads(threads)
        for case in prepared:
            results.append({"threads": threads, **case.measure(repeats)})
    return results


def _mla_call(
    name: str,
    create: Callable[[BackendConfig], AttentionBackend],
    layer: AttentionLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    q: Tensor,
    dtype: str,
) -> Callable[[], Tensor]:
    row = Capabilities(
        kind="mla",
        device="any",
        dtypes={dtype},
        kv_dtypes={dtype},
        priority=0,
        head_dim_pairs="any",
    )
    config = BackendConfig(
        name=name,
        row=row,
        layers=(layer,),
        page_size=PAGE,
        dtype=dtype,
        kv_cache_dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = create(config)
    metadata = backend.init_forward_metadata(batch)

    def call() -> Tensor:
        got = backend.forward(q, None, None, layer, cache, batch, metadata)
        assert isinstance(got, Tensor)
        return got

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("bf16",))
    parser.add_argument("--level", choices=LEVELS, help="a lower level than the CPU's")
    parser.add_argument("--cores", nargs="+", type=int, help="numbers of threads")
    parser.add_argument("--against", type=pathlib.Path, help="kernels of another version")
    args = parser.parse_args()
    kernels = load()
    if args.against is not None:
        del CONTESTANTS["torch_native"]
        CONTESTANTS[args.against.stem] = of_library(args.against.resolve())
    if args.level is not None:
        kernels.level = min(kernels.level, LEVELS.index(args.level))
    level = LEVELS[kernels.level]
    suffix = f"{level}.scaling" if args.cores else level
    output = args.output or RESULTS / f"intel_amx_cpu.{suffix}.json"
    torch.manual_seed(0)
    with torch.inference_mode():
        if args.cores:
            results = scaling(args.cores, args.repeats, args.dtypes)
        else:
            results = [case.measure(args.repeats) for case in cases(args.dtypes)]
    report = {
        "benchmark": "intel_amx_cpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "level": level,
        "threads": torch.get_num_threads(),
        **placement(),
        "results": results,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
