"""Run a second backend on a sample of passes, and report the first difference with a file."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import AttnError, UnsupportedError, UsageError
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.backend import (
    AttentionBackend,
    BackendConfig,
    Metadata,
    Output,
    create_backend,
)
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import refuse_drafts, refuse_scales
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.routes import Route
from attn_core.spec.kinds import SERVING
from attn_core.trust.capture import Call, captured, nbytes, padded
from attn_core.trust.files import save
from attn_core.trust.judge import Answer, Verdict, judge
from attn_core.trust.reproducer import Setting
from attn_core.trust.rerun import device_of, fitting_row
from attn_core.trust.screen import suspects

logger = logging.getLogger("attn_core.shadow")
MOST_SUSPECTS = 8  # requests of a call that the oracle is asked for


@dataclass(frozen=True)
class Difference:
    """Two backends differ, and not both are within the suite's tolerance of the truth.

    number: of the pass, from 0, among those that were not captured. request: its row in the batch.
    verdicts: backend → its error in this request. file: what reproduces it; `unwritten` says why
    there is none.
    """

    number: int
    mode: ForwardMode
    layer: int
    request: int
    verdicts: Mapping[str, Verdict]
    file: Path | None = None
    unwritten: str = ""

    def __str__(self) -> str:
        said = "; ".join(
            f"{name} is {'wrong' if verdict.wrong else 'right'} ({verdict})"
            for name, verdict in self.verdicts.items()
        )
        then = f"`attn replay {self.file}` reproduces it" if self.file else self.unwritten
        return (
            f"pass {self.number} ({self.mode.value}), layer {self.layer}, request {self.request}: "
            f"{said}; {then}"
        )


class Shadow:
    """A second backend that runs a sample of the passes again and is compared; for a dispatcher.

    Outputs and cache stay as they are: the second backend reads the cache and writes nothing. Of
    each mode the first pass and every `every`th after it is compared, in all layers, output and,
    where it was asked for, LSE. Passes in CUDA graphs are not. Requests that differ by more than
    rounding are judged by the float64 oracle; it counts as a difference if one backend is beyond
    the tolerance of the conformance suite. The first is logged and kept in `difference`, a file
    that reproduces it is written, and no more is compared until `difference` is None again. If the
    second backend fails, `problem` says so, and nothing is compared any more.

    backend: its name. folder: where the file goes. max_bytes: the size of its tensors at most;
    other requests of the pass are left out first. report: called with the difference.
    Raises UnknownBackendError, and UsageError for an `every` below 1.
    """

    def __init__(
        self,
        backend: str,
        *,
        every: int = 100,
        folder: Path | str = "attn-shadow",
        max_bytes: int = 256 << 20,
        registry: Registry | None = None,
        report: Callable[[Difference], None] | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every {every} (expected 1 or more: every pass, every second …)")
        self._registry = load_plugins() if registry is None else registry
        self._spec, self.every = self._registry.get(backend), every
        self.folder, self.max_bytes, self._report = Path(folder), max_bytes, report
        self.passes, self.compared = 0, 0  # eager passes seen, calls of layers compared
        self.difference: Difference | None = None
        self.problem = ""
        self._turns: Counter[ForwardMode] = Counter()
        self._second: dict[int, AttentionBackend] = {}  # by id() of the backend that it shadows

    def attach(self, backends: Sequence[AttentionBackend], layout: str) -> None:
        """Create the second backend for each of these; a backend is not its own shadow.

        Raises UnsupportedError where no row of it fits, and UsageError where there is nothing to
        compare or it is attached already.
        """
        if self._second:
            raise UsageError("this Shadow has a dispatcher already: create one for each")
        for first in backends:
            other = first.config.name != self._spec.name and first.config.row.absorbed
            if other and id(first) not in self._second:
                self._second[id(first)] = self._create(first.config, layout)
        if not self._second:
            raise UsageError(
                f"shadow {self._spec.name}: no other backend runs passes over the cache; name "
                "another one"
            )

    def _create(self, config: BackendConfig, layout: str) -> AttentionBackend:
        setting = Setting.of(config)
        chunks = any(layer.dual_chunk is not None for layer in config.layers)
        if setting.kind not in ("mha", "mla") or chunks:
            what = "dual chunk attention" if chunks else f"kind {setting.kind}"
            raise UnsupportedError(f"a shadow of {what} (supports mha and mla)")
        row = fitting_row(
            self._spec,
            self._registry,
            setting,
            config.layers,
            page_size=config.page_size,
            layout=layout,
            phases=sorted(config.row.phases & SERVING, key=lambda p: p.value),
            topk=config.topk if config.row.max_verify_topk else 0,
            device=device_of(config.device),
        )
        return create_backend(
            self._spec, dataclasses.replace(config, name=self._spec.name, row=row)
        )

    def routes(self, routes: Sequence[Route], batch: ForwardBatch) -> Mapping[Route, Route]:
        """Return routes that also run the second backend, none if this pass is not sampled."""
        number, turn = self.passes, self._turns[batch.forward_mode]
        self.passes += 1
        self._turns[batch.forward_mode] += 1
        if turn % self.every or self._resting() or _capturing(batch):
            return {}
        paired = {}
        try:
            for route in routes:
                second = self._second.get(id(route.backend))
                if second is None:
                    continue
                refuse_drafts(second.config, batch)
                own = _read_only(batch)
                sampled = _Sampled(number, second, own, second.init_forward_metadata(own))
                paired[route] = dataclasses.replace(route, run=partial(self._run, route, sampled))
        except Exception as error:  # a plugin's code must not stop the pass that it watches
            self._failed(error)
            return {}
        return paired

    def _resting(self) -> bool:
        return self.difference is not None or bool(self.problem)

    def _run(
        self, route: Route, sampled: _Sampled, q: Tensor, k: Tensor | None, v: Tensor | None,
        layer: AttentionLayer, cache: LayerCache, batch: ForwardBatch, metadata: Metadata, *,
        out: Tensor | None, return_lse: bool, topk_indices: Tensor | None,
    ) -> Output:  # fmt: skip
        result = route.run(
            q, k, v, layer, cache, batch, metadata,
            out=out, return_lse=return_lse, topk_indices=topk_indices,
        )  # fmt: skip
        if not self._resting() and not _capturing(batch):
            call = Call(sampled.batch, layer, cache, q, k, v)
            try:
                with torch.no_grad():
                    self._compare(route.backend, sampled, call, result, return_lse)
            except Exception as error:  # as in `route`
                self._failed(error)
        return result

    def _compare(
        self,
        first: AttentionBackend,
        sampled: _Sampled,
        call: Call,
        result: Output,
        return_lse: bool,
    ) -> None:
        second, lse = sampled.backend, return_lse and sampled.backend.config.row.lse
        refuse_scales(second.config, call.layer, call.cache)
        got = second.forward(
            call.q, call.k, call.v, call.layer, call.cache, sampled.batch, sampled.metadata,
            out=None, return_lse=lse,
        )  # fmt: skip
        answers = {}
        for backend, value in ((first, result), (second, got)):
            rounds = _rounds(backend.config)
            answers[backend.config.name] = Answer(*_parts(value, lse), rounds)
        self.compared += 1
        a, b = answers.values()
        real = [i for i in suspects(a, b, call.batch) if not padded(call, i)]
        for request in real[:MOST_SUSPECTS]:
            alone = captured(first.config, call, answers, [request], {})
            verdicts = judge(alone, _of(alone.recorded, answers))
            if any(verdict.wrong for verdict in verdicts.values()):
                self._record(first.config, sampled, call, answers, request, verdicts)
                return

    def _record(
        self,
        config: BackendConfig,
        sampled: _Sampled,
        call: Call,
        answers: Mapping[str, Answer],
        request: int,
        verdicts: Mapping[str, Verdict],
    ) -> None:
        mode, layer = call.batch.forward_mode, call.layer.layer_id
        path: Path | None = None
        why = ""
        kept, size = [request], nbytes(call, [request])
        if size > self.max_bytes:
            why = f"no file: it would take {size} bytes, max_bytes is {self.max_bytes}"
        else:
            everyone = list(range(call.batch.batch_size))
            kept = everyone if nbytes(call, everyone) <= self.max_bytes else kept
            about = {
                "pass": sampled.number,
                "request": kept.index(request),
                "request_of_the_pass": request,
                "first": config.name,
                "second": self._spec.name,
                "device": str(config.device),
                "arch": config.arch,
                "torch": torch.__version__,
            }
            path = self.folder / f"pass{sampled.number}-{mode.value}-layer{layer}.safetensors"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                save(captured(config, call, answers, kept, about), path)
            except (OSError, AttnError) as error:
                path, why = None, f"no file: {error}"
        plain = {name: dataclasses.replace(v, request=request) for name, v in verdicts.items()}
        self.difference = Difference(sampled.number, mode, layer, request, plain, path, why)
        logger.error("%s", self.difference)
        if self._report is not None:
            self._report(self.difference)

    def _failed(self, error: Exception) -> None:
        self.problem = f"{self._spec.name}: {type(error).__name__}: {error}"
        logger.warning("the shadow compares nothing any more: %s", self.problem)


@dataclass(frozen=True, eq=False)
class _Sampled:
    """A pass that is compared: its number, the second backend and its plan of the pass."""

    number: int
    backend: AttentionBackend
    batch: ForwardBatch
    metadata: Metadata


def _capturing(batch: ForwardBatch) -> bool:
    return batch.positions.is_cuda and torch.cuda.is_current_stream_capturing()


def _read_only(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch without slots to write, so that no kernel writes K and V again."""
    views = {
        name: dataclasses.replace(view, out_cache_loc=None) for name, view in batch.views.items()
    }
    return dataclasses.replace(batch, views=views)


def _rounds(config: BackendConfig) -> torch.dtype | None:
    fp8 = config.row.quantizes_q_to_fp8 and config.kv_cache_dtype.startswith("fp8")
    return TORCH_DTYPES[config.kv_cache_dtype] if fp8 else None


def _parts(value: Output, lse: bool) -> tuple[Tensor, Tensor | None]:
    out, logs = value if isinstance(value, tuple) else (value, None)
    return out, logs if lse else None


def _of(
    recorded: Mapping[str, tuple[Tensor, Tensor | None]], answers: Mapping[str, Answer]
) -> dict[str, Answer]:
    return {name: Answer(*parts, answers[name].rounds) for name, parts in recorded.items()}
