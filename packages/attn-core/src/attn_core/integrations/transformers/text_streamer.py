"""A streamer for transformers' generate() that writes text and keeps times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor


class TextStreamer:
    """Writes text as soon as its characters are complete, and notes when tokens came.

    ids: the new tokens. start, first, last: seconds of time.perf_counter() at the prompt, the first
    new token and the last one.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self.ids: list[int] = []
        self._from = self._to = 0  # tokens that give the context, and those written
        self.start = self.first = self.last = time.perf_counter()
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt in the first call, then each new token."""
        now = time.perf_counter()
        if self._prompt:
            self._prompt, self.start = False, now
            self.first = self.last = now
            return
        self.first, self.last = (self.first if self.ids else now), now
        self.ids += value.reshape(-1).tolist()
        self._show(final=False)

    def end(self) -> None:
        """Do nothing: the caller calls flush(), also after an error."""

    def flush(self) -> None:
        """Write the text that waited for the rest of a character."""
        self._show(final=True)

    def _show(self, final: bool) -> None:
        # A few earlier tokens are decoded again, since tokenizers drop spaces at the start.
        # The cost does not grow with the text.
        shown = self._decode(self.ids[self._from : self._to])
        text = self._decode(self.ids[self._from :])
        if not final and text.endswith("\ufffd"):
            return  # the rest of a character is still to come
        piece = text[len(shown) :]
        if piece:
            # before the write, which Ctrl-C mostly interrupts: no text may be written twice
            self._from, self._to = self._to, len(self.ids)
            self._write(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
