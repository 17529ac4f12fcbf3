"""Faults of sparse MLA: which keys are selected, how index keys are read, what is attended to."""

import torch
from sparse_reference import SparseReference


class TiesToTheLastKey(SparseReference):
    def pick(self, scores, topk):
        turned = scores.flip(0).argsort(descending=True, stable=True)[:topk]
        return (len(scores) - 1 - turned).sort().values


class TiesByArrival(SparseReference):
    """Equal scores are taken in no order, as atomics leave them."""

    def pick(self, scores, topk):
        mixed = torch.randperm(len(scores))
        picked = mixed[scores[mixed].argsort(descending=True, stable=True)[:topk]]
        return picked.sort().values


class NegativeZeroBelowZero(SparseReference):
    """Scores are ranked by their bits, where -0 and 0 differ; here every second zero is -0."""

    def pick(self, scores, topk):
        odd = torch.arange(len(scores)) % 2 == 1
        return super().pick(torch.where((scores == 0) & odd, -1e-30, scores), topk)


class OneKeyTooFew(SparseReference):
    def pick(self, scores, topk):
        return super().pick(scores, topk - 1)


class SmallestScores(SparseReference):
    def pick(self, scores, topk):
        return super().pick(-scores, topk)


class FirstKeysWithoutScores(SparseReference):
    """The scores are skipped, as if all keys were selected."""

    def pick(self, scores, topk):
        return torch.arange(min(topk, len(scores)))


class FirstKeysInVerification(SparseReference):
    def index_topk(self, q_index, weights, layer, cache, batch, metadata):
        self.verifies = batch.spec is not None
        return super().index_topk(q_index, weights, layer, cache, batch, metadata)

    def pick(self, scores, topk):
        if self.verifies:
            return torch.arange(min(topk, len(scores)))
        return super().pick(scores, topk)


class SelectsUnsorted(SparseReference):
    def pick(self, scores, topk):
        return scores.argsort(descending=True, stable=True)[:topk]


class QuerySeesTheNextKey(SparseReference):
    def seen(self, rows, i):
        return min(super().seen(rows, i) + 1, rows.length)


class QueryDoesNotSeeItself(SparseReference):
    def seen(self, rows, i):
        return max(1, super().seen(rows, i) - 1)


class QueriesSeeAllKeys(SparseReference):
    def seen(self, rows, i):
        return rows.length


class DraftsCountedTwice(SparseReference):
    def seen(self, rows, i):
        return max(1, super().seen(rows, i) - (rows.queries if rows.queries > 1 else 0))


class PlanarReadAsInterleaved(SparseReference):
    """A page of values and then scales is read token by token."""

    def planes(self, index, size, dim):
        tokens = index.unflatten(1, (size, dim + 4))
        return tokens[..., :dim], tokens[..., dim:]


class IndexScalesOfTheNextPage(SparseReference):
    def planes(self, index, size, dim):
        values, scales = super().planes(index, size, dim)
        return values, scales.roll(1, 0)


class IndexScaleIgnored(SparseReference):
    def scaled(self, values, scales):
        return values


class IndexScaleOfTheNextToken(SparseReference):
    def scaled(self, values, scales):
        return values * scales.roll(1, 0)


class PagesForTokens(SparseReference):
    """A page is taken for the slot of its first token."""

    def named(self, seen, picked, rows, cache):
        size = cache.page_size
        return rows.table[picked // size] + picked % size


class PositionsForSlots(SparseReference):
    def named(self, seen, picked, rows, cache):
        return picked


class TableRowOfTheFirstRequest(SparseReference):
    def index_topk(self, q_index, weights, layer, cache, batch, metadata):
        self.table = metadata["batch"].views[layer.view].page_table
        return super().index_topk(q_index, weights, layer, cache, batch, metadata)

    def named(self, seen, picked, rows, cache):
        size = cache.page_size
        return self.table[0].long()[picked // size] * size + picked % size


class ReluMissing(SparseReference):
    def relu(self, products):
        return products


class ReluOfTheSum(SparseReference):
    def index_scores(self, q, w, keys):
        return (w @ (q @ keys.T)).relu()


class HeadWeightsIgnored(SparseReference):
    def weights(self, weights, token):
        return torch.ones_like(weights[token])


class HeadWeightsOfTheNextHead(SparseReference):
    def weights(self, weights, token):
        return weights[token].roll(1)


class HeadWeightsOfTheFirstToken(SparseReference):
    def weights(self, weights, token):
        return weights[0]


class ScoresInHalfPrecision(SparseReference):
    def index_scores(self, q, w, keys):
        return super().index_scores(q, w, keys).bfloat16().float()


class UnusedSlotsAreSlotZero(SparseReference):
    def used(self, slots):
        return slots.clamp(min=0)


class UnusedSlotsAreTheLastSlot(SparseReference):
    def used(self, slots):
        return slots


class FirstSlotsOnly(SparseReference):
    def used(self, slots):
        return super().used(slots)[:128]


class LastSlotForgotten(SparseReference):
    def used(self, slots):
        result = super().used(slots)
        return result[: max(1, len(result) - 1)]


class SlotsInOrderOnly(SparseReference):
    """A search that takes the slots of a query to rise."""

    def used(self, slots):
        result = super().used(slots)
        rising = result >= result.cummax(0).values if len(result) else result
        return result[rising] if len(result) else result


class SelectionIgnored(SparseReference):
    def forward(self, *args, topk_indices=None, **options):
        return super().forward(*args, **options)


class SelectionOfTheCapture(SparseReference):
    """The selection of the first pass is kept, as memory of a graph may be."""

    kept = None

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.keeps = True

    keeps = False

    def index_topk(self, *args):
        chosen = super().index_topk(*args)
        if not self.keeps:
            return chosen
        self.kept = chosen if self.kept is None else self.kept
        return self.kept


class LatentScalesIgnored(SparseReference):
    def of_blocks(self, scales):
        return torch.full_like(scales, 0.125)


class LatentScaleOfTheFirstBlock(SparseReference):
    """One scale for all values of a token."""

    def of_blocks(self, scales):
        return scales[:, :1].expand_as(scales)


class LatentScaleOfTheNextBlock(SparseReference):
    def of_blocks(self, scales):
        return scales.roll(1, 1)


class LatentScalesOfTheNextToken(SparseReference):
    def of_blocks(self, scales):
        return scales.roll(1, 0)


class LatentScalesOfSmallBlocks(SparseReference):
    """A scale is taken for 64 values, not for 128."""

    def of_blocks(self, scales):
        half = scales.shape[1] // 2
        return scales[:, :half].repeat_interleave(2, 1)


class LatentsAsE5M2(SparseReference):
    def e4m3(self, values):
        return values.contiguous().view(torch.float8_e5m2).float()


class RopeBehindTheValues(SparseReference):
    """The rope part is read where the scales are."""

    def parts(self, tokens, dim):
        values, scales, rope = super().parts(tokens, dim)
        return values, scales, tokens[:, dim : dim + rope.shape[1]]


class RopeOfTheNextToken(SparseReference):
    def parts(self, tokens, dim):
        values, scales, rope = super().parts(tokens, dim)
        return values, scales, rope.roll(1, 0)


class RopeScaled(SparseReference):
    """The rope part is multiplied by the scale of the last values, as if it were FP8 too."""

    def latents(self, cache):
        result = super().latents(cache)
        if cache.latent_dim:
            scales = self.parts(cache.k.flatten(0, 2), cache.latent_dim)[1].contiguous()
            result[:, cache.latent_dim :] *= scales.view(torch.float32)[:, -1:]
        return result


class RopeAsFloat16(SparseReference):
    def rope(self, raw):
        return raw.view(torch.float16).float()


class RopeForgotten(SparseReference):
    def rope(self, raw):
        return torch.zeros_like(super().rope(raw))
