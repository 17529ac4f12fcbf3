"""Faults: each class is the reference or the wrapper with one mistake of a kind seen in kernels."""

import math
import time
from dataclasses import replace

import torch
from attn_core.ops.merge import merge_states
from attn_core.testing.inputs import mapped
from reference import Reference
from wrapped import Wrapper


class WindowOneTooWide(Reference):
    def in_window(self, key, query, window):
        return key >= query - window


class WindowOneTooNarrow(Reference):
    def in_window(self, key, query, window):
        return key > query - window + 1


class WindowIgnored(Reference):
    def in_window(self, key, query, window):
        return key >= 0


class WindowByDraftIndex(Reference):
    """The position of a draft is its index, not its depth."""

    def depth(self, tree):
        return torch.arange(tree.shape[0], device=tree.device)


class WindowFromChunkStart(Reference):
    """Windows count from the first new token of the pass."""

    def position(self, position, rows):
        return position - int(rows.queries > 1)


class ScaleOnePercentOff(Reference):
    def scale(self, layer):
        return layer.scale * 1.01


class ScaleOfHeadDim(Reference):
    """The layer's own scale is ignored."""

    def scale(self, layer):
        return layer.head_dim**-0.5


class LseBaseTwo(Reference):
    def natural(self, lse):
        return lse / math.log(2)


class LseWithoutSink(Reference):
    def with_sinks(self, out, lse, layer):
        return super().with_sinks(out, lse, layer)[0], lse


class LseRounded(Reference):
    def natural(self, lse):
        return lse.to(torch.bfloat16).float()


class LseOfNothingIsZero(Reference):
    def natural(self, lse):
        return lse.masked_fill(lse == -torch.inf, 0.0)


class OnePageTooFar(Reference):
    def rows(self, batch, view):
        size, found = self.config.page_size, super().rows(batch, view)
        return [replace(r, length=min(r.length + size, r.table.numel() * size)) for r in found]


class LastPageWhole(Reference):
    """The length of the last page is ignored."""

    def rows(self, batch, view):
        size = self.config.page_size
        return [replace(r, length=-(-r.length // size) * size) for r in super().rows(batch, view)]


class OneKeyShort(Reference):
    def rows(self, batch, view):
        return [replace(r, length=max(r.length - 1, r.queries)) for r in super().rows(batch, view)]


class LengthOfTheLongest(Reference):
    def rows(self, batch, view):
        found = super().rows(batch, view)
        return [replace(r, length=max(x.length for x in found)) for r in found]


class PagesInOrderOfTheirIds(Reference):
    def rows(self, batch, view):
        size = self.config.page_size
        return [
            replace(r, table=r.table[: -(-r.length // size)].sort().values)
            for r in super().rows(batch, view)
        ]


class SlotForPage(Reference):
    """Table entries are taken for token slots."""

    def slots(self, rows, page_size):
        position = torch.arange(rows.length, device=rows.table.device)
        return rows.table[position // page_size].long() + position % page_size


class PageSizeOf16(Reference):
    def slots(self, rows, page_size):
        position = torch.arange(rows.length, device=rows.table.device)
        index = (position // 16).clamp(max=rows.table.numel() - 1)
        return rows.table[index].long() * page_size + position % 16 % page_size


class TableRowOfTheNext(Reference):
    def rows(self, batch, view):
        found = super().rows(batch, view)
        return [replace(r, table=found[(r.index + 1) % len(found)].table) for r in found]


class TailReadAndMasked(Reference):
    """Keys past the end weigh nothing, but their values are read: 0 · NaN."""

    def read(self, cache, rows, layer):
        size = cache.page_size
        return super().read(cache, replace(rows, length=-(-rows.length // size) * size), layer)

    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, rows.length, device)
        return torch.nn.functional.pad(seen, (0, s - rows.length))


class BehindTheWindowReadAndMasked(Reference):
    """Keys behind the window weigh nothing, but their values are read: 0 · NaN."""

    def without_what_is_behind(self, values, rows, layer):
        return values


class BehindTheWindowReadAtPageOne(Reference):
    """Single tokens are gathered by a path of their own, from the first one of the request."""

    def without_what_is_behind(self, values, rows, layer):
        if self.config.page_size == 1:
            return values
        return super().without_what_is_behind(values, rows, layer)


class CausalTopLeft(Reference):
    def last_key(self, query, n, s):
        return query


class CausalWithoutItself(Reference):
    def last_key(self, query, n, s):
        return (query + s - n - 1).clamp(min=0)


class CausalIgnored(Reference):
    def last_key(self, query, n, s):
        return query * 0 + s


class PrefixIgnored(Reference):
    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, s, device)
        if n > 1 and layer.is_causal and not layer.is_cross:
            seen[:, : s - n] = False
        return seen


class RaggedTopLeft(Reference):
    def last_key(self, query, n, s):
        return query if self.ragged else super().last_key(query, n, s)

    ragged = False

    def forward_ragged(self, *args, **kwargs):
        self.ragged = True
        return super().forward_ragged(*args, **kwargs)


class RaggedAlwaysCausal(Reference):
    def forward_ragged(self, *args, causal, **kwargs):
        return super().forward_ragged(*args, causal=True, **kwargs)


class RaggedKeysByQueries(Reference):
    """The ends of the queries are taken for those of the keys."""

    def forward_ragged(self, q, k, v, layer, cq, ck, max_q, max_k, **kwargs):
        return super().forward_ragged(q, k, v, layer, cq, cq, max_q, max_q, **kwargs)


class GqaInterleaved(Reference):
    """Query head h reads KV head h % Hkv instead of h // group."""

    def kv_head(self, k, layer):
        return k.repeat(1, layer.num_q_heads // layer.num_kv_heads, 1)


class TreeIgnored(Reference):
    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(torch.ones_like(tree).tril(), prefix)


class TreeTransposed(Reference):
    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(tree.T, prefix)


class TreeOnThePrefix(Reference):
    """The mask is laid on the first keys instead of the last."""

    def seen_drafts(self, tree, prefix):
        n = tree.shape[0]
        seen = tree.new_ones(n, prefix + n).tril(prefix)
        seen[:, :n] = tree
        return seen


class TreeOfAnotherRequest(Reference):
    def tree(self, mask, b):
        return mask[b - 1]


class CapIgnored(Reference):
    def cap(self, scores, cap):
        return scores


class CapAfterTheMask(Reference):
    def cap_and_mask(self, scores, seen, cap):
        return self.cap(self.mask(scores, seen), cap)


class CapNotScaledBack(Reference):
    def cap(self, scores, cap):
        return scores if cap is None else torch.tanh(scores / cap)


class SinksIgnored(Reference):
    def with_sinks(self, out, lse, layer):
        return out, lse


class SinksAddedToTheOutput(Reference):
    def with_sinks(self, out, lse, layer):
        scaled, total = super().with_sinks(out, lse, layer)
        if layer.sinks is None:
            return scaled, total
        return scaled + (layer.sinks - total).exp()[..., None], total


class SinksOfOtherHeads(Reference):
    def with_sinks(self, out, lse, layer):
        sinks = None if layer.sinks is None else layer.sinks.flip(0)
        return super().with_sinks(out, lse, replace(layer, sinks=sinks))


class ScalesSwapped(Reference):
    def scales(self, cache):
        return cache.v_scale, cache.k_scale


class ValueScaleIgnored(Reference):
    def scales(self, cache):
        return cache.k_scale, (cache.k_scale if cache.v is None else 1.0)


class KeyScaleIgnored(Reference):
    def scales(self, cache):
        return 1.0, cache.v_scale


class E5m2ReadAsE4m3(Reference):
    def decode_fp8(self, x, scale):
        return super().decode_fp8(x.view(torch.float8_e4m3fn), scale)


class Fp4NibblesSwapped(Reference):
    def decode_fp4(self, codes, unit, scale):
        return super().decode_fp4((codes >> 4) | (codes << 4), unit, scale)


class Fp4ScaleOfTheNextBlock(Reference):
    def decode_fp4(self, codes, unit, scale):
        raw = unit.view(torch.uint8)
        return super().decode_fp4(codes, raw.roll(1, -1).view(unit.dtype), scale)


class ValuesByTheStrideOfKeys(Reference):
    def read(self, cache, rows, layer):
        keys, values = super().read(cache, rows, layer)
        if cache.v is None or cache.v.dtype.itemsize == 1 or cache.layout != "NHD":
            return keys, values
        flat, inner = cache.v.flatten(), cache.k[0, 0].numel()
        slots = self.slots(rows, cache.page_size)[:, None, None]
        head = torch.arange(cache.k.shape[2], device=flat.device)[:, None] * cache.k.shape[3]
        at = slots * inner + head + torch.arange(cache.v.shape[3], device=flat.device)
        return keys, flat[at % flat.numel()].float()


class RopePartDropped(Reference):
    def score(self, q, k):
        return super().score(q[..., :512], k[..., :512])


class NoMaxSubtracted(Reference):
    def softmax(self, scores, v):
        p = scores.exp()
        total = p.sum(-1)
        out = torch.einsum("hns,shd->nhd", p, v) / total.T.clamp(min=1e-30)[..., None]
        return out, total.log().T


class HalvesAveraged(Reference):
    """Two splits of the keys are merged without their weights."""

    def softmax(self, scores, v):
        s = scores.shape[-1]
        if s < 64:
            return super().softmax(scores, v)
        parts = [
            super(HalvesAveraged, self).softmax(scores[..., a], v[a])
            for a in (slice(0, s // 2), slice(s // 2, s))
        ]
        return (parts[0][0] + parts[1][0]) / 2, torch.logaddexp(parts[0][1], parts[1][1])


class MergedWithoutMax(Reference):
    """Two splits of the keys are merged by exp(LSE) as it is."""

    def softmax(self, scores, v):
        half = scores.shape[-1] // 2
        if not half:
            return super().softmax(scores, v)
        parts = [
            super(MergedWithoutMax, self).softmax(scores[..., a], v[a])
            for a in (slice(0, half), slice(half, None))
        ]
        (a, b), (x, y) = ([o.nan_to_num(0.0) for o, _ in parts], [lse.exp() for _, lse in parts])
        out = (a * x[..., None] + b * y[..., None]) / (x + y).clamp(min=1e-30)[..., None]
        return out, (x + y).log()


class ScoresInBfloat16(Reference):
    def score(self, q, k):
        return super().score(q.bfloat16(), k.bfloat16()).float()


class CrossKeysOfTheDecoder(Reference):
    def rows(self, batch, view):
        return super().rows(batch, "full")


class QueriesTakenForContiguous(Reference):
    def queries(self, q):
        return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))


class BufferNotFilled(Reference):
    """A new output is returned instead of the buffer that was given."""

    def buffer(self, q, layer, out):
        return super().buffer(q, layer, None)


class OutputInFloat32(Reference):
    def buffer(self, q, layer, out):
        return super().buffer(q.float(), layer, None)


class PlanOfTheFirstPass(Reference):
    first = None

    def init_forward_metadata(self, batch):
        self.first = self.first or super().init_forward_metadata(batch)
        return self.first


class StaleAfterReplay(Reference):
    """The plan of the capture is not refilled."""

    def init_forward_metadata_capture_cuda_graph(self, batch):
        self.static["batch"] = mapped(batch, torch.Tensor.clone)
        return self.static

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        pass


class StaleTablesAfterReplay(StaleAfterReplay):
    """Lengths are refilled, page tables are not."""

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        old = metadata["batch"]
        views = {
            name: replace(view, page_table=old.views[name].page_table)
            for name, view in batch.views.items()
        }
        metadata["batch"] = replace(batch, views=views)


class NotDeterministic(Reference):
    def score(self, q, k):
        return super().score(q + torch.randn_like(q) * 1e-4, k)


class WritesOneSlotOff(Reference):
    def write(self, cache, k, v, slots):
        super().write(cache, k, v, slots + 1)


class WritesPaddedRows(Reference):
    """Tokens of padded rows go to a real page instead of the dummy."""

    def write(self, cache, k, v, slots):
        size = cache.page_size
        super().write(cache, k, v, torch.where(slots < size, slots + size, slots))


class WritesTheFirstLayer(Reference):
    first = None

    def forward(self, q, k, v, layer, cache, *args, **kwargs):
        if layer.layer_id == 0:
            self.first = cache
        return super().forward(q, k, v, layer, cache, *args, **kwargs)

    def write(self, cache, k, v, slots):
        super().write(self.first, k, v, slots)


class WritesWithoutSaturation(Reference):
    def encode_fp8(self, x, dtype, scale):
        y = x.float() / scale
        # not every cast gives NaN beyond the largest number, so say it
        return y.masked_fill(y.abs() > torch.finfo(dtype).max, torch.nan).to(dtype)


class WritesValuesOverKeys(Reference):
    def write(self, cache, k, v, slots):
        super().write(cache, k if v is None or v.shape != k.shape else v, v, slots)


class ScribblesIntoTheCache(Reference):
    """A scratch row lies in the last page of the pool."""

    def read(self, cache, rows, layer):
        found = super().read(cache, rows, layer)
        self.bytes(cache.k)[-1, -1] = 0
        return found


class RaggedHeadsTakenForAdjacent(Reference):
    """The step from token to token is taken for that of all heads."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        k, v = (x.as_strided(x.shape, (x.shape[1] * x.stride(1), x.stride(1), 1)) for x in (k, v))
        return super().forward_ragged(q, k, v, *args, **kwargs)


class RaggedValuesContiguousAsKeys(Reference):
    """Where the keys are contiguous the values are taken for it too."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        if k.is_contiguous():
            v = v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1))
        return super().forward_ragged(q, k, v, *args, **kwargs)


class RaggedNotWithoutKeys(Reference):
    """Requests without keys are left as they were."""

    def forward_ragged(self, q, k, v, layer, cq, ck, *args, out=None, **kwargs):
        before = None if out is None else out.clone()
        got = super().forward_ragged(q, k, v, layer, cq, ck, *args, out=out, **kwargs)
        out = got[0] if isinstance(got, tuple) else got
        counts, keys = cq.diff().tolist(), ck.diff().tolist()
        at = 0
        for n, s in zip(counts, keys, strict=True):
            if not s:
                out[at : at + n] = torch.nan if before is None else before[at : at + n]
            at += n
        return got


class RaggedValuesOfAllRequests(Reference):
    """The values of the whole batch are multiplied, those of other requests by zero."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        got = super().forward_ragged(q, k, v, *args, **kwargs)
        out = got[0] if isinstance(got, tuple) else got
        out += (0 * v).sum()
        return got


class QueryHeadsTakenForAdjacent(Reference):
    def queries(self, q):
        return q.as_strided(q.shape, (q.stride(0), q.shape[2], 1), q.storage_offset())


class QueriesByTheLargestOfTheBatch(Reference):
    def queries(self, q):
        top = q.abs().amax()
        return (q / top).nan_to_num(posinf=0.0, neginf=0.0) * top


class LengthsOfTheSpec(Reference):
    """Every request of a batch with a spec is taken to have as many queries as drafts."""

    def rows(self, batch, view):
        found = super().rows(batch, view)
        if batch.spec is None:
            return found
        n, total = batch.spec.num_draft_tokens, batch.num_tokens
        slices = [slice(min(r.index * n, total), min((r.index + 1) * n, total)) for r in found]
        return [replace(r, tokens=s) for r, s in zip(found, slices, strict=True)]


class TreeBelowTheDiagonal(Reference):
    """A draft sees no draft that is named after it."""

    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(tree.tril(), prefix)


class DepthFromTheFirstDraft(Reference):
    """The first draft is taken for a root."""

    def depth(self, tree):
        depth = super().depth(tree)
        return depth - depth[0]


class DraftsUpTo64(Reference):
    def tree(self, mask, b):
        mask = mask[b].clone()
        mask[:, 64:] = False
        return mask


class SinkLostWithoutKeys(Reference):
    def attend(self, q, k, v, layer, rows):
        if not len(k):
            layer = replace(layer, sinks=None)
        return super().attend(q, k, v, layer, rows)


class NoKeysNowhere(Reference):
    """A pass in which no request has a key gives its buffer back."""

    def forward(self, q, k, v, layer, cache, batch, metadata, *, out=None, **kwargs):
        if not any(r.length for r in self.rows(metadata["batch"], layer.view)):
            lse = torch.full(q.shape[:2], -torch.inf)
            out = torch.empty_like(q).fill_(torch.nan) if out is None else out
            return (out, lse) if kwargs.get("return_lse") else out
        return super().forward(q, k, v, layer, cache, batch, metadata, out=out, **kwargs)


class BatchEndsAtTheFirstEmptyRequest(Reference):
    def rows(self, batch, view):
        found = super().rows(batch, view)
        ends = [r.index for r in found if not r.queries]
        return found[: ends[0]] if ends else found


class RequestsUpTo64(Reference):
    def rows(self, batch, view):
        return super().rows(batch, view)[:64]


class WindowOfAllQueriesButOneIgnored(Reference):
    """A block of many queries needs no window, unless it is narrower than the block less one."""

    def attend(self, q, k, v, layer, rows):
        if layer.sliding_window == rows.queries - 1 >= 64:
            layer = replace(layer, sliding_window=None)
        return super().attend(q, k, v, layer, rows)


class LseHeadsFirst(Reference):
    """The LSE is [Hq, T] in memory, and called [T, Hq]."""

    def forward(self, *args, **kwargs):
        got = super().forward(*args, **kwargs)
        return (got[0], got[1].T.reshape(got[1].shape)) if isinstance(got, tuple) else got


class InParts(Reference):
    """Right: the keys are cut into parts, whose results are merged by their log-sum-exp."""

    part = 64

    def softmax(self, scores, v):
        s = scores.shape[-1]
        cuts = [slice(a, a + self.part) for a in range(0, s, self.part)] or [slice(0, 0)]
        parts = [super(InParts, self).softmax(scores[..., c], v[c]) for c in self.kept(cuts)]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return merge_states(outs, lses)

    def kept(self, cuts):
        return cuts


class LastOfManyPartsDropped(InParts):
    def kept(self, cuts):
        return cuts[:32]


class SinkInEveryPartOf512(InParts):
    part = 512

    def attend(self, q, k, v, layer, rows):
        more = (-(-k.shape[0] // self.part) or 1) - 1
        if layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks + math.log1p(more))
        return super().attend(q, k, v, layer, rows)


class PartsByTheLongest(InParts):
    """How the keys of a request are cut depends on the longest of its neighbours."""

    def rows(self, batch, view):
        found = super().rows(batch, view)
        self.part = max(1, max(r.length for r in found) // 3)
        return found


class Fp4ScalesOfTheFirstCall(Reference):
    """The scales of FP4 are made once, though every layer has its own."""

    first = None

    def scales(self, cache):
        if cache.block_scales is None:
            return super().scales(cache)
        self.first = self.first or super().scales(cache)
        return self.first


class LongestOfTheFirstReplay(Reference):
    longest = None

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        self.longest = self.longest or batch.views["full"].max_seq_len
        super().init_forward_metadata_replay_cuda_graph(batch, metadata)

    def rows(self, batch, view):
        longest = self.longest or 1 << 30
        return [replace(r, length=min(r.length, longest)) for r in super().rows(batch, view)]


class TableTakenForContiguousInAGraph(Reference):
    graph = False

    def init_cuda_graph_state(self, *args):
        self.graph = True
        super().init_cuda_graph_state(*args)

    def rows(self, batch, view):
        if self.graph:
            full = batch.views[view]
            table = full.page_table.as_strided(full.page_table.shape, (full.page_table.shape[1], 1))
            batch = replace(batch, views={**batch.views, view: replace(full, page_table=table)})
        return super().rows(batch, view)


class WindowIgnoredInAGraph(Reference):
    graph = False

    def init_cuda_graph_state(self, *args):
        self.graph = True
        super().init_cuda_graph_state(*args)

    def in_window(self, key, query, window):
        return key > query - (1 << 30 if self.graph else window)


class PlanOfAllInstances(Reference):
    """The plan is kept in the class: the last one of any instance counts."""

    plans: list = []  # noqa: RUF012  # shared on purpose: that is the fault

    def init_forward_metadata(self, batch):
        self.plans[:] = [batch]
        return self.plans

    def forward(self, q, k, v, layer, cache, batch, metadata, **kwargs):
        metadata = metadata if isinstance(metadata, dict) else {"batch": metadata[0]}
        return super().forward(q, k, v, layer, cache, batch, metadata, **kwargs)


class ScratchOfAllThreads(Reference):
    """Queries are staged in a buffer of the class."""

    scratch = torch.empty(1 << 20)

    def queries(self, q):
        staged = self.scratch[: q.numel()].view(q.shape)
        staged.copy_(q)
        time.sleep(1e-4)
        return staged.to(q.dtype).clone()


class OffsetsOf16Bits(Reference):
    """Where a page begins is counted in numbers, and wraps."""

    def slots(self, rows, page_size):
        per_token = self.config.layers[0].num_kv_heads * self.config.layers[0].head_dim
        return super().slots(rows, page_size) * per_token % (1 << 16) // per_token


# Faults of a wrapper: the library that it calls is right, what it is told is not.


class WrapperLseInBaseTwo(Wrapper):
    """The library's LSE is returned as it is."""

    def natural(self, lse):
        return lse


class WrapperWindowLeftIsW(Wrapper):
    """window_left counts the token itself in the model, not in the library."""

    def mask(self, window):
        return {**super().mask(window), "window_left": -1 if window is None else window}


class WrapperNoWindowIsZero(Wrapper):
    def mask(self, window):
        return {**super().mask(window), "window_left": (window or 1) - 1}


class WrapperCausalByDefault(Wrapper):
    """causal is left at the library's default, which is False."""

    def mask(self, window):
        return {} if window is None else super().mask(window)


class WrapperLastPageFull(Wrapper):
    def csr(self, view):
        csr = super().csr(view)
        return replace(csr, last_page_len=torch.full_like(csr.last_page_len, self.config.page_size))


class WrapperTableWithItsPadding(Wrapper):
    """Every row of the table is handed over whole."""

    def csr(self, view):
        rows, width = view.page_table.shape
        ends = torch.arange(rows + 1, dtype=torch.int32, device=view.page_table.device) * width
        return replace(super().csr(view), indptr=ends, indices=view.page_table.flatten())


class WrapperStaleIndptr(Wrapper):
    """Index pointers, a buffer per batch size, are filled by the first pass alone."""

    def __init__(self, config):
        super().__init__(config)
        self.first = {}

    def csr(self, view):
        csr = super().csr(view)
        kept = self.first.setdefault(view.seq_lens.shape[0], csr.indptr)
        return replace(csr, indptr=kept)


class WrapperStalePlan(Wrapper):
    """A pass with the lengths of the one before is not planned again, though its pages moved."""

    lengths = None

    def init_forward_metadata(self, batch):
        lengths = batch.query_lens_host, batch.views["full"].seq_lens_host
        if self.lengths is None or self.lengths != lengths:
            self.lengths, self.kept = lengths, super().init_forward_metadata(batch)
        return self.kept


class WrapperOneWindowForAll(Wrapper):
    """Every layer is planned with the window of the first one."""

    def plan(self, batch, view, window):
        return super().plan(batch, view, self.config.layers[0].sliding_window)


class WrapperScalesSwapped(Wrapper):
    def arguments(self, layer, cache):
        found = super().arguments(layer, cache)
        return {**found, "k_scale": found["v_scale"], "v_scale": found["k_scale"]}


class WrapperScalesForgotten(Wrapper):
    def arguments(self, layer, cache):
        return {**super().arguments(layer, cache), "k_scale": None, "v_scale": None}


class WrapperScaleOfHeadDim(Wrapper):
    def arguments(self, layer, cache):
        return {**super().arguments(layer, cache), "sm_scale": layer.head_dim**-0.5}


class WrapperSoftcapForgotten(Wrapper):
    def arguments(self, layer, cache):
        return {**super().arguments(layer, cache), "logits_soft_cap": 0.0}


class WrapperSoftcapOfTheFirstLayer(Wrapper):
    def arguments(self, layer, cache):
        cap = self.config.layers[0].logit_cap or 0.0
        return {**super().arguments(layer, cache), "logits_soft_cap": cap}


class WrapperScaleOfTheFirstLayer(Wrapper):
    def arguments(self, layer, cache):
        return {**super().arguments(layer, cache), "sm_scale": self.config.layers[0].scale}


class WrapperScalesOfTheFirstCall(Wrapper):
    """The scale tensors are made once, though every layer has its own."""

    first = None

    def arguments(self, layer, cache):
        found = super().arguments(layer, cache)
        self.first = self.first or {x: found[x] for x in ("k_scale", "v_scale")}
        return {**found, **self.first}


class WrapperOutIgnored(Wrapper):
    """The library's own tensor is returned, the buffer that was given stays as it was."""

    def handed_over(self, new, out):
        return new


class WrapperOutNotFilled(Wrapper):
    """The buffer that was given is returned, and nothing was copied into it."""

    def handed_over(self, new, out):
        return new if out is None else out


MUTANTS = tuple(
    x
    for x in globals().values()
    if isinstance(x, type) and x.__module__ == __name__ and x not in (InParts, OffsetsOf16Bits)
)
# These are faults of a kernel that writes new keys and values itself.
WRITERS = tuple(x for x in MUTANTS if x.__name__.startswith("Writes"))
WRAPPERS = tuple(x for x in MUTANTS if issubclass(x, Wrapper))
