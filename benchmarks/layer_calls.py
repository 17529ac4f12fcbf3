"""Measure the host's time of a layer's call: `python -m benchmarks.layer_calls [--only REGEX]`.

MLA, sparse MLA (DSA) and linear attention (GDN, KDA) on triton, and one case of each kind on every
backend that is installed, eagerly, each with its writes: through the dispatcher, everything
planned. Short requests, so that the host is the slower one. A time is the median of calls that are
queued without waiting for the device between them, in the fastest of several rounds over all calls:
what else runs on a host slows some seconds of it, and only adds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.state_pool import StatePool
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.linear import Gate, LinearLayer
from attn_core.runtime.linear_routes import LinearRoutes
from attn_core.spec.kinds import Role
from torch import Tensor

from benchmarks import linear_cases, sparse_cases
from benchmarks.added import host_us, serving
from benchmarks.attention import device_name, versions
from benchmarks.backend_calls import backend_calls
from benchmarks.cases import LATENT, ROPE, Case, build
from benchmarks.linear_cases import LinearCase
from benchmarks.ours import device_kind
from benchmarks.recorded import recording
from benchmarks.results import FOLDER, command_of, slug
from benchmarks.sparse_cases import PAGE, STORES, SparseCase, Store

Call = Callable[[], object]
LIBRARIES = ("flashinfer-python", "flash-attn-4", "sglang-kernel", "sgl-flash-mla", "sgl-deep-gemm")
LIMIT_US = 30.0  # of a call, its writes included
LAUNCHES: dict[str, tuple[str, ...]] = {  # what a launch goes through: again, or by Triton
    "attn_core.ops.triton.launcher": ("Launcher.launch",),
    "triton.runtime.jit": ("JITFunction.run",),
}
MLA = Case(
    phase="mla", batch=16, length=1024, q_heads=128, kv_heads=1, head_dim=LATENT + ROPE,
    v_head_dim=LATENT,
)  # fmt: skip
SPARSE = (
    SparseCase(phase="decode", batch=16, new=1, length=4096),
    SparseCase(phase="prefill", batch=16, new=4, length=4096),
)
VENDORS = ("nsa", "nsa:flashmla_sparse", "nsa:flashmla_kv", "nsa:fa3")
_KDA: dict[str, Any] = {"kind": "kda", "heads": (32, 32)}
LINEAR = (
    LinearCase(op="decode", batch=64),
    LinearCase(op="verify", batch=64, tokens=4),
    LinearCase(op="verify", batch=64, tokens=4, tree=True),
    LinearCase(op="commit", batch=64, tokens=4),
    LinearCase(op="prefill", batch=16, tokens=64),
    LinearCase(op="decode", batch=64, **_KDA),
    LinearCase(op="verify", batch=64, tokens=4, **_KDA),
    LinearCase(op="prefill", batch=16, tokens=64, **_KDA),
)


@dataclass(frozen=True, eq=False)
class OneLayer:
    """A pool of one layer, as a dispatcher takes it."""

    cache: LayerCache
    kv_cache_dtype: Store
    device: torch.device
    page_size: int = PAGE
    layout: str = "NHD"

    def layer(self, layer_id: int) -> LayerCache:
        """Return its pages."""
        return self.cache


def mla_calls(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield MLA's decode."""
    inputs = build(MLA, device)
    served = serving("triton", inputs, load_plugins(), device_kind(device))
    yield MLA.name, served.layer(served.plan(), writes=True)


def sparse_calls(case: SparseCase, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield the two calls of a layer: write index keys and latents, and select; attend.

    A pass's first layer prepares the launches of the others, so it is timed with the plan, too.
    """
    x = sparse_cases.build(case, device)
    for store in STORES:
        yield from _chain(f"dsa {case.name} {store}", x, _serving("triton", x, store))


def vendor_calls(name: str, case: SparseCase, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield the calls of `sparse_calls` by a vendor's kernels, where these are installed."""
    x = sparse_cases.build(case, device)
    for store in STORES:
        label = f"{name} dsa {case.name} {store}"
        try:
            calls = [*_chain(label, x, _serving(name, x, store))]
            for _, call in calls:
                call()
        except Exception as error:  # another project's code may raise anything
            message = " ".join(str(error).split())[:200]
            print(f"{label}: {type(error).__name__}: {message}", file=sys.stderr, flush=True)
            continue
        yield from (x for x in calls if not x[0].endswith("first layer"))


def _serving(name: str, x: sparse_cases.SparseInputs, store: Store) -> HybridDispatcher:
    backend, _ = sparse_cases.backend_of(name, x, store)
    pool: Any = OneLayer(x.caches[store], store, x.q.device)
    roles: tuple[Role, ...] = ("prefill", "decode")
    return HybridDispatcher(dict.fromkeys(roles, backend), pool)


def _chain(
    name: str, x: sparse_cases.SparseInputs, serve: HybridDispatcher
) -> Iterator[tuple[str, Call]]:
    plan, k = serve.init_forward_metadata(x.batch), x.q[:, :1].contiguous()

    def select() -> Tensor | None:
        return serve.index_topk(x.q_index, x.k_index, x.weights, x.layer, x.batch, plan, k=k)

    chosen = select()

    def attend() -> object:
        return serve.forward(x.q, None, None, x.layer, x.batch, plan, topk_indices=chosen)

    yield f"{name}: index_topk", select
    yield f"{name}: attend", attend
    yield f"{name}: plan", lambda: serve.init_forward_metadata(x.batch)

    def first() -> object:
        made = serve.init_forward_metadata(x.batch)
        indexed = (x.q_index, x.k_index, x.weights, x.layer, x.batch, made)
        selected = serve.index_topk(*indexed, k=k)
        return serve.forward(x.q, None, None, x.layer, x.batch, made, topk_indices=selected)

    yield f"{name}: plan and first layer", first


def linear_calls(case: LinearCase, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield the call of a layer, or the commit of a pool of one."""
    x = linear_cases.build(case, device)
    of, weights = x.layer, x.layer.gate
    layer = LinearLayer(
        layer_id=0, num_k_heads=of.num_k_heads, num_v_heads=of.num_v_heads,
        head_k_dim=of.head_k_dim, head_v_dim=of.head_v_dim, kind=case.kind, qk_norm=of.qk_norm,
        gate=Gate(A_log=weights.A_log, dt_bias=weights.dt_bias),
    )  # fmt: skip
    drafts = case.tokens if case.op in ("verify", "commit") else 0
    pool = StatePool([layer], num_slots=len(x.pool), num_drafts=drafts, device=device)
    spec = load_plugins().get("triton", "linear")
    row = next(
        r for r in spec.capabilities
        if r.kind == case.kind and r.device == "cuda" and "fp32" in r.kv_dtypes
    )  # fmt: skip
    config = BackendConfig(
        name=spec.name, row=row, layers=(), linear_layers=(layer,), page_size=1, dtype="bf16",
        kv_cache_dtype="fp32", device=device, topk=2 if case.tree else 1, num_draft_tokens=drafts,
    )  # fmt: skip
    backend = create_backend(spec, config, "linear")
    roles: tuple[Role, ...] = ("linear_prefill", "linear_decode", "linear_verify")
    routes = LinearRoutes(dict.fromkeys(roles[: 3 if drafts else 2], backend), pool)
    batch = _linear_batch(case, x)
    parts = routes.plan(batch)
    tokens = (x.q, x.k, x.v, x.f, x.b)

    def run() -> Tensor:
        return routes.forward(*tokens, layer, batch, parts, None)

    if case.op == "commit":
        run()
        yield case.name, lambda: routes.commit(batch, parts, x.accepted)
    else:
        yield case.name, run


def _linear_batch(case: LinearCase, x: linear_cases.LinearInputs) -> ForwardBatch:
    mode = {"prefill": ForwardMode.EXTEND, "decode": ForwardMode.DECODE}.get(
        case.op, ForwardMode.TARGET_VERIFY
    )
    verifies = mode is ForwardMode.TARGET_VERIFY
    return ForwardBatch(
        forward_mode=mode,
        cu_seqlens_q=x.cu_seqlens.int(),
        positions=torch.arange(case.batch * case.tokens, device=x.q.device),
        max_q_len=case.tokens,
        query_lens_host=(case.tokens,) * case.batch,
        state_slots=x.slots,
        spec=SpecInfo(topk=2 if case.tree else 1, num_draft_tokens=case.tokens, tree_mask=x.mask)
        if verifies
        else None,
    )


def all_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], Iterator[Any]]]]:
    """Yield each group of calls by a name that its calls' names begin with."""
    yield MLA.name, partial(mla_calls, device)
    for sparse in SPARSE:
        yield f"dsa {sparse.name}", partial(sparse_calls, sparse, device)
    for name in VENDORS:
        yield f"{name} dsa {SPARSE[0].name}", partial(vendor_calls, name, SPARSE[0], device)
    yield from backend_calls(device)
    for linear in LINEAR:
        yield linear.name, partial(linear_calls, linear, device)


def measure(name: str, call: Call, device: torch.device) -> dict[str, Any]:
    """Return the record of a call, with its first round."""
    call()  # may compile
    with recording(LAUNCHES) as recorder:
        call()
        launched = recorder.taken()
    by_triton = sum(x.func.__name__ == "run" for x in launched)
    result = {"name": name, "launches": len(launched), "by_triton": by_triton, "rounds": []}
    measure_again(result, call, device)
    return result


def measure_again(record: dict[str, Any], call: Call, device: torch.device) -> None:
    """Time a call once more: its record has the median of each round, and the fastest round."""
    [time] = host_us((call,), device)
    record["rounds"].append(round(time.us, 2))
    if record["rounds"][-1] == min(record["rounds"]):
        times = {"us": time.us, "p20": time.p20, "p80": time.p80}
        record.update({name: round(us, 2) for name, us in times.items()})


def show(x: dict[str, Any]) -> None:
    """Print a record of a call."""
    over = "" if x["us"] <= LIMIT_US or ": plan" in x["name"] else f" OVER {LIMIT_US:g}"
    print(
        f"{x['name']:<48} {x['us']:7.1f} µs ({x['p20']:.1f} to {x['p80']:.1f}), "
        f"{x['launches']} launches, {x['by_triton']} by Triton{over}",
        flush=True,
    )


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_calls", description=__doc__)
    parser.add_argument("--only", default="", help="calls whose name matches this pattern")
    parser.add_argument("--rounds", type=int, default=3, help="over all calls")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=pathlib.Path, help="the JSON (default: in results)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    result: list[dict[str, Any]] = []
    path = args.out or FOLDER / f"layer_calls.{slug(device_name(device))}.json"
    data = {
        "schema": 1,
        "suite": "layer_calls",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": versions(["attn-core", *LIBRARIES]),
        "command": command_of("benchmarks.layer_calls", argv),
        "limit_us": LIMIT_US,
        "calls": result,
    }
    by_name: dict[str, dict[str, Any]] = {}
    for number in range(1, args.rounds + 1):
        print(f"round {number} of {args.rounds}", flush=True)
        for group, calls in all_calls(device):
            if not re.search(args.only, group):
                continue
            for name, call in calls():
                if number == 1:
                    result.append(measure(name, call, device))
                    by_name[name] = result[-1]
                    show(result[-1])
                else:
                    measure_again(by_name[name], call, device)
            path.write_text(json.dumps(data, indent=1) + "\n")  # what fails next loses nothing
    for record in result:
        show(record)
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
