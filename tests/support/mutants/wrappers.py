"""Faults of a wrapper: the library that it calls is right, what it is told is not."""

from dataclasses import replace

import torch
from wrapped import Wrapper


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
        result = super().arguments(layer, cache)
        return {**result, "k_scale": result["v_scale"], "v_scale": result["k_scale"]}


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
        result = super().arguments(layer, cache)
        self.first = self.first or {x: result[x] for x in ("k_scale", "v_scale")}
        return {**result, **self.first}


class WrapperOutIgnored(Wrapper):
    """The library's own tensor is returned, the buffer that was given stays as it was."""

    def handed_over(self, new, out):
        return new


class WrapperOutNotFilled(Wrapper):
    """The buffer that was given is returned, and nothing was copied into it."""

    def handed_over(self, new, out):
        return new if out is None else out
