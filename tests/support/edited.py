"""Our Triton backend with one line of a kernel edited, in Triton's interpreter."""

import functools
from contextlib import contextmanager
from unittest import mock

from attn_core.backends.triton.backend import Triton
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction


class Editor(FunctionRewriter):
    """Rewrites a kernel for the interpreter, one piece of its source replaced."""

    def __init__(self, fn, before, after):
        super().__init__(fn)
        self.before, self.after = before, after

    def _prepare_source(self, lines):
        source = super()._prepare_source(lines)
        result = source.count(self.before)
        if result != 1:
            raise ValueError(f"{self.fn.__name__} has {self.before!r} {result} times, not once")
        return source.replace(self.before, self.after)


@functools.cache
def edited(fn, before, after):
    """Return what the interpreter runs for a kernel whose text `before` reads `after`."""
    return Editor(fn, before, after).rewrite_ast()


class Edited(Triton):
    """Runs its passes with one edit: `kernel`, a function of Triton's, reads `after`."""

    kernel: InterpretedFunction
    before = after = ""

    @contextmanager
    def edit(self):
        kernel = type(self).kernel.fn
        new = {kernel: edited(kernel, self.before, self.after)}
        with mock.patch.dict(InterpretedFunction.rewritten_fn, new):
            yield

    def _plan(self, *args, **kwargs):
        with self.edit():
            return super()._plan(*args, **kwargs)

    def init_forward_metadata_replay_cuda_graph(self, *args, **kwargs):
        with self.edit():
            super().init_forward_metadata_replay_cuda_graph(*args, **kwargs)

    def forward(self, *args, **kwargs):
        with self.edit():
            return super().forward(*args, **kwargs)

    def forward_ragged(self, *args, **kwargs):
        with self.edit():
            return super().forward_ragged(*args, **kwargs)
