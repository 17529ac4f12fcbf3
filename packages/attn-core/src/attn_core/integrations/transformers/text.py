"""From a model directory or a GGUF file and a prompt to a stream of text on paged pools."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging

from attn_core.decision import Overrides
from attn_core.device import probe_device
from attn_core.errors import ContextLengthError, ModelConfigError, UsageError
from attn_core.integrations.transformers.choose import select_for
from attn_core.integrations.transformers.engine import Engine, enable
from attn_core.kv_cache import STORES
from attn_core.models import context_length, read_config, requirements_from_config

MAX_NEW_TOKENS = 256  # where nothing else is asked and the context has room


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A loaded model on paged pools, its tokenizer and its context length (None: not known)."""

    model: Any
    tokenizer: Any
    engine: Engine
    context_length: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a generation did: tokens, and seconds up to the first and between first and last."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    interrupted: bool = False


def load(
    path: Path,
    *,
    dtype: str | None = None,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    num_pages: int | None = None,
    overrides: Overrides | None = None,
    step: Callable[[str], None] = lambda name: None,
) -> TextModel:
    """Load a model from local files, never running code from them, and enable attn-core on it.

    path: a directory with config.json, or a GGUF file. dtype: "bf16", "fp16", "fp32" or None: the
    model's, for a GGUF file fp32 on a CPU, else bf16. step is called with the name of each step
    before it. The selection comes first, so that a wrong flag costs no loading. Raises
    ModelConfigError, UnsupportedError, and what select() raises.
    """
    step("selecting backends")
    config = read_config(path)
    gguf = path.suffix == ".gguf"
    device = _torch_device()
    if dtype is None and gguf:
        dtype = "fp32" if device.type == "cpu" else "bf16"
    plain = requirements_from_config(config, dtype=dtype).dtype
    selection = select_for(
        config,
        dtype=STORES[plain],
        device=device,
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        overrides=overrides,
    )
    where = path if path.is_dir() else path.parent
    files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf:
        files["gguf_file"] = path.name
    # reading a GGUF file draws a bar that nothing else turns off
    with _quiet(), contextlib.redirect_stderr(io.StringIO()):
        step("loading the tokenizer")
        tokenizer = _of(path, lambda: AutoTokenizer.from_pretrained(where, **files))
        step("loading the weights")
        kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        model = _of(path, lambda: kind.from_pretrained(where, dtype=STORES[plain], **files))
    step("moving the model")
    model = model.to(device).eval()
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if isinstance(ends, list) else ends
    # greedy: a checkpoint's own sampling settings would make two runs differ
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    engine = enable(model, selection, num_pages=num_pages)
    return TextModel(
        model=model, tokenizer=tokenizer, engine=engine, context_length=context_length(config)
    )


def encode(tokenizer: Any, prompt: str, *, chat: bool) -> Tensor:
    """Tokenize a prompt as int64 [1, T], as a user's message where the tokenizer has a template.

    Raises UsageError for an empty prompt or a template that fails.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give some text")
    if chat and tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        try:
            prompt = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the model's author
            raise UsageError(
                f"the chat template fails: {type(error).__name__}: {error}; leave out --chat"
            ) from error
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise UsageError(f"the prompt {prompt!r} has no tokens in this model's vocabulary")
    return torch.tensor([ids])


def generate(
    text: TextModel,
    prompt: Tensor,
    write: Callable[[str], None],
    *,
    max_new_tokens: int | None = None,
) -> Iterator[Report]:
    """Generate greedily from int64 [1, T]; yield one Report, after all text was written.

    write gets each piece of text as it comes. Ctrl-C ends the generation, the report says so. An
    error is raised after everything that was generated is written and reported. Raises
    ContextLengthError before anything runs, OutOfPagesError.
    """
    length = prompt.shape[1]
    limit = _limit(text.context_length, length, max_new_tokens)
    stream = _Stream(text.tokenizer, write)
    interrupted, failure = False, None
    try:
        with _quiet():
            text.model.generate(
                prompt.to(text.model.device),
                attention_mask=torch.ones_like(prompt, device=text.model.device),
                max_new_tokens=limit,
                streamer=stream,
            )
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        failure = error
    with _quiet():
        stream.flush()
    yield Report(
        prompt_tokens=length,
        new_tokens=len(stream.ids),
        prefill_seconds=stream.first - stream.start,
        decode_seconds=stream.last - stream.first,
        interrupted=interrupted,
    )
    if failure is not None:
        raise failure


def _limit(context: int | None, length: int, asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise UsageError(f"--max-new-tokens {asked}: at least 1")
    if context is None:
        return asked or MAX_NEW_TOKENS
    if length + (asked or 1) > context:
        more = f" and {asked} new tokens" if asked else ""
        raise ContextLengthError(
            f"a prompt of {length} tokens{more} for a context of {context}; shorten the prompt"
            + (f" or ask for at most {context - length}" if asked and length < context else "")
        )
    return asked or min(MAX_NEW_TOKENS, context - length)


class _Stream:
    """A streamer as generate() wants one: text as soon as its characters are whole, and times."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self.ids: list[int] = []
        self._from = self._to = 0  # tokens that give the context, and those written
        self.start = self.first = self.last = time.perf_counter()
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then each new token."""
        now = time.perf_counter()
        if self._prompt:
            self._prompt, self.start = False, now
            self.first = self.last = now
            return
        self.first, self.last = (self.first if self.ids else now), now
        self.ids += value.reshape(-1).tolist()
        self._show(final=False)

    def end(self) -> None:
        """Do nothing: flush() is called in every case."""

    def flush(self) -> None:
        """Write what was held back."""
        self._show(final=True)

    def _show(self, final: bool) -> None:
        # Decoding a few tokens more than are new keeps the spaces that a tokenizer drops at the
        # start, and costs the same however long the text is.
        before = self._decode(self.ids[self._from : self._to])
        text = self._decode(self.ids[self._from :])
        if not final and text.endswith("\ufffd"):
            return  # the rest of a character is still to come
        piece = text[len(before) :]
        if piece:
            # first, because Ctrl-C mostly strikes inside write: nothing may be written twice
            self._from, self._to = self._to, len(self.ids)
            self._write(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _torch_device() -> torch.device:
    here = probe_device().type
    return torch.device("cuda" if here == "rocm" else here)


def _of(path: Path, build: Callable[[], Any]) -> Any:
    """Build something from a model's files; what goes wrong is the files' fault."""
    try:
        return build()
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ModelConfigError(f"cannot load {path}: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own bars and remarks out of the stream."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
