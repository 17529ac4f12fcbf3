"""Single passes of the MLA backends over their emulated libraries, and what is right for them."""

import dataclasses
import importlib

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.plugins.registry import load_plugins
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import LATENT, RELATED
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import attend, compare, create, prepared

FLASHINFER = {"flashinfer-python": "0.6.14"}
# Heads, query lens and seq lens of passes with a query whose own key begins a block of 64, and
# whose heads lie in two tiles of FlashInfer's kernels.
BETWEEN_TILES = [
    (128, (1, 0), (1, 1)),
    (128, (0, 1), (129, 1)),
    (128, (0, 1, 0), (5, 65, 0)),
    (128, (2, 0, 0, 0), (66, 3, 1, 0)),
    (20, (9, 0, 7), (67, 4, 129)),
    (96, (2, 4), (65, 67)),
]
CASES = {case.feature: case for case in LATENT} | RELATED["mla"]


class Emulated(BackendSuite):
    """The suite of a backend's MLA rows, on an emulated GPU."""

    kinds = ("mla",)
    on = "cpu"
    passes = 30

    @pytest.fixture(autouse=True)
    def gpu(self, vendor):
        put_in(self.device.partition(":")[2])


def put_in(arch):
    """Emulate a GPU: "sm90"; others are no capability of FlashInfer's."""
    if not arch.startswith("sm"):
        return
    capability = (int(arch[2:-1]), int(arch[-1]))
    importlib.import_module("flashinfer.mla").compute_capability = capability


class Pass:
    """A pass of the suite on one row of a backend.

    case: the name of a case, changed by `changes`. phase and store pick the row. device: "cpu" has
    the emulated libraries, "cuda" the real ones.
    """

    def __init__(
        self,
        backend,
        case,
        *,
        arch="sm90",
        page_size=64,
        phase="decode",
        dtype="bf16",
        device="cpu",
        **changes,
    ):
        if device == "cpu":
            put_in(arch)
        spec = load_plugins().get(backend)
        self.case = dataclasses.replace(CASES[case], **changes)
        store = dtype if self.case.kv_dtype == "auto" else self.case.kv_dtype
        self.row = next(
            r
            for r in spec.capabilities
            if r.kind == "mla"
            and arch in r.archs
            and store in r.kv_dtypes
            and phase in {p.value for p in r.phases}
        )
        self.point = Point(dtype=dtype, page_size=page_size)
        self.bench = Bench(spec=spec, row=self.row, torch_device=torch.device(device), arch=arch)
        self.inputs, self.right = prepared(self.bench, self.case, self.point)

    def backend(self):
        """Create the backend for this pass."""
        return create(self.bench, self.case, self.inputs, self.point)

    def check(self, backend, *, batch=None, metadata=None, preallocated=False):
        """Run the pass and compare every number, the LSE too where the row has it."""
        lse = self.row.lse
        actual = attend(
            backend,
            self.inputs,
            batch=batch,
            metadata=metadata,
            preallocated=preallocated,
            return_lse=lse,
        )
        tokens = self.inputs.real_tokens
        compare(actual, self.right, tokens, TORCH_DTYPES[self.point.dtype], "output")
        return actual


def ragged(query_lens, key_lens, heads=4):
    """Draw q, k [T, H, 192], v [T, H, 128] in bfloat16 and the cumulative lengths of both."""
    rng = torch.Generator().manual_seed(0)
    t, s = sum(query_lens), sum(key_lens)
    sizes = ((t, heads, 192), (s, heads, 192), (s, heads, 128))
    q, k, v = (torch.randn(size, generator=rng).bfloat16() for size in sizes)
    indptr = [torch.tensor([0, *n]).cumsum(0).int() for n in (query_lens, key_lens)]
    return (q, k, v), indptr


def attend_ragged(q, k, v, query_lens, key_lens, scale):
    """Attend in float32, all keys of a request visible; no keys give zeros and -inf."""
    outs, sums = [], []
    at = base = 0
    for n, s in zip(query_lens, key_lens, strict=True):
        scores = torch.einsum("qhd,khd->qhk", q[at : at + n].float(), k[base : base + s].float())
        scores = scores * scale
        sums.append(scores.logsumexp(-1) if s else torch.full(scores.shape[:2], -torch.inf))
        weights = scores.softmax(-1)
        outs.append(torch.einsum("qhk,khd->qhd", weights, v[base : base + s].float()))
        at, base = at + n, base + s
    return torch.cat(outs), torch.cat(sums)


def counted(monkeypatch, owner, name):
    """Count the calls of a function, from now on."""
    calls = []
    real = getattr(owner, name)

    def call(*args, **more):
        calls.append((args, more))
        return real(*args, **more)

    monkeypatch.setattr(owner, name, call)
    return calls
