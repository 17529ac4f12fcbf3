"""One site of a backend, a pass or a ragged call, run with tensors that have no memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.plugins.dependencies import Libraries
from attn_core.selection.compatibility import mismatches
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import LATENT_KINDS
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, make_inputs, make_layer, mapped
from attn_core.testing.passes import attend, create, indptr
from attn_core.testing.sparse_passes import chosen

T = TypeVar("T")


class NotDeclared(Exception):  # noqa: N818  # no error: the site is left out
    """No row of the backend says that it does this on that chip."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU that is not here, and the backend whose kernels are compiled for it.

    on: where torch is told that tensors lie. tensors: the mode in which they have no memory.
    """

    spec: BackendSpec
    arch: str
    libraries: Libraries
    on: torch.device
    tensors: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def device(self) -> Device:
        """The chip as rows name it."""
        return Device("cuda" if self.arch.startswith("sm") else "rocm", self.arch)

    def moved(self, x: T) -> T:
        """Return a dataclass with tensors like its own there, without their numbers."""
        return mapped(
            x, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.on)
        )


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is launched for a case, by the first row that declares it. lse: it is asked for."""

    case: Case | RaggedCase
    dtype: str = "bf16"
    page_size: int = 64
    lse: bool = True
    deterministic: bool = False
    shared_prefix: bool = False

    @property
    def kind(self) -> str:
        """The kind of attention."""
        return self.case.kind

    @property
    def paged(self) -> bool:
        """Whether it is a pass over pages."""
        return isinstance(self.case, Case)

    @property
    def cells(self) -> frozenset[str]:
        """The cells of the support matrix whose kernels these are."""
        cells = set(self.case.cells)
        if not self.paged and self.case.kind == "mha" and self.case.causal:
            cells.discard("encoder")
        flags = {
            "lse": self.lse,
            "deterministic": self.deterministic,
            "shared_prefix": self.shared_prefix,
        }
        return frozenset(cells | {name for name, on in flags.items() if on})

    def row(self, chip: Chip) -> Capabilities:
        """Return the row that is asked. Raises NotDeclared with what the nearest one lacks."""
        case, gaps = self.case, []
        needs = case.needs(self.dtype, self.page_size) if self.paged else case.needs(self.dtype)
        needs = replace(
            needs,
            lse=self.lse,
            deterministic=self.deterministic,
            shared_prefix=self.shared_prefix,
        )
        drafts = needs.speculation is not None
        phases = case.phases if self.paged else (case.phase,)
        for row in chip.spec.capabilities:
            phase = next((p for p in phases if p in row.phases), None)
            if phase is None or (row.kind, row.device) != (case.kind, chip.device.type):
                continue
            gap = mismatches(row, needs, chip.device, chip.libraries, phase, speculates=drafts)
            lacks = [*map(str, gap)]
            if self.paged and not row.absorbed:
                lacks.append("passes over the latent cache (absorbed: not supported)")
            if not self.paged and case.kind in LATENT_KINDS and not row.chunked_prefix:
                lacks.append("chunked_prefix (not supported)")
            if not lacks:
                return row
            gaps.append("; ".join(lacks))
        raise NotDeclared(min(gaps, key=len, default=f"no row for {case.kind}"))

    def __call__(self, chip: Chip) -> None:
        """Plan and run one layer: every kernel of the backend."""
        requested = Bench(
            spec=chip.spec,
            row=self.row(chip),
            torch_device=chip.on,
            arch=chip.arch,
            multiprocessors=132,  # of an H200; it is no constant of a kernel
            deterministic=self.deterministic,
            shared_prefix=self.shared_prefix,
        )
        (self._pass if self.paged else self._call)(chip, requested)

    def _pass(self, chip: Chip, asked: Bench) -> None:
        point, row = Point(dtype=self.dtype, page_size=self.page_size), asked.row
        drawn = make_inputs(
            self.case,
            point,
            requires_finite_padding=row.requires_finite_padding,
            fused=row.fused_kv_write,
        )
        with chip.tensors():
            inputs = chip.moved(drawn)
            backend = create(asked, self.case, inputs, point)
            if inputs.indexer is not None:
                chosen(backend, inputs)
            attend(backend, inputs, cache=inputs.cache, return_lse=self.lse)

    def _call(self, chip: Chip, asked: Bench) -> None:
        case = self.case
        (hq, hkv), (d, dv) = case.heads, case.dims
        dtype = TORCH_DTYPES[self.dtype]
        drawn = make_layer(case, torch.Generator())
        with chip.tensors():
            layer = chip.moved(drawn)
            q = torch.empty(sum(case.query_lens), hq, d, dtype=dtype, device=chip.on)
            keys = (sum(case.key_lens), hkv)
            k, v = (torch.empty(*keys, n, dtype=dtype, device=chip.on) for n in (d, dv))
            asked.create((layer,), dtype=self.dtype).forward_ragged(
                q,
                k,
                v,
                layer,
                indptr(case.query_lens, chip.on),
                indptr(case.key_lens, chip.on),
                max(case.query_lens),
                max(case.key_lens),
                causal=case.causal,
                return_lse=self.lse,
            )


def described(name: str, site: object) -> dict[str, Any]:
    """Return a site's name, kind and cells for JSON; a launch that is a function proves no cell."""
    kind, cells = getattr(site, "kind", None), getattr(site, "cells", ())
    return {"site": name, "kind": kind, "cells": sorted(cells)}
