"""Stream text from a model directory or GGUF file and a prompt, on paged pools."""

from __future__ import annotations

import contextlib
import io
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

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import ContextLengthError, ModelConfigError, UsageError
from attn_core.integrations.transformers.chat import TemplateError, render
from attn_core.integrations.transformers.checkpoint import (
    attempt,
    check_files,
    end_tokens,
    load_weights,
    plain_config,
    refuse_adapter,
    token_list,
)
from attn_core.integrations.transformers.engine import Engine, enable
from attn_core.integrations.transformers.few_rows import speed_up_linear
from attn_core.integrations.transformers.pool_size import check_size
from attn_core.integrations.transformers.select import select_for
from attn_core.integrations.transformers.text_streamer import TextStreamer
from attn_core.model_config import context_length, read_config, requirements_from_config
from attn_core.selection.result import Overrides
from attn_core.spec.device import probe_device

MAX_NEW_TOKENS = 256  # where nothing else is asked and the context has room
MAX_TOKENS = 1 << 30  # of a model whose context is not known


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A loaded model on paged pools, its tokenizer and its context length (None: not known).

    warnings: sentences about the files that a reader of the text should know.
    """

    model: Any
    tokenizer: Any
    engine: Engine
    context_length: int | None
    warnings: tuple[str, ...] = ()


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
    locked: str | None = None,
    adaptive: bool | None = None,
    step: Callable[[str], None] = lambda name: None,
    prepare: Callable[[Any, int | None], None] = lambda tokenizer, context_length: None,
) -> TextModel:
    """Load a model from local files, never running code from them, and enable attn-core on it.

    path: a directory with config.json, or a GGUF file. dtype: "bf16", "fp16", "fp32" or None: the
    model's, for a GGUF file fp32 on a CPU, else bf16. locked, adaptive: as in select_for. step is
    called with the name of each step before it. What can be wrong is looked at before the weights
    are loaded: the selection comes first, then prepare(tokenizer, context_length), which may raise
    for a bad prompt. Raises ModelConfigError, UnsupportedError, and what select() raises.
    """
    step("selecting backends")
    keys = attempt(path, lambda: read_config(path))
    gguf = path.suffix == ".gguf"
    device = torch.device(probe_device().type.replace("rocm", "cuda"))
    if dtype is None and gguf:
        dtype = "fp32" if device.type == "cpu" else "bf16"
    needs = requirements_from_config(keys, dtype=dtype)
    weights = TORCH_DTYPES[needs.dtype]
    selection = select_for(
        keys,
        dtype=weights,
        device=device,
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        overrides=overrides,
        locked=locked,
        adaptive=adaptive,
    )
    check_size(keys, needs.layers, selection, num_pages, device)
    directory = path if path.is_dir() else path.parent
    files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    refuse_adapter(directory)
    ends: list[int] | None = None
    if gguf:
        files["gguf_file"] = path.name
    else:
        check_files(directory)
        ends = end_tokens(directory, keys)
        files["config"] = plain_config(keys, path)
    # reading a GGUF file draws a bar that nothing else turns off
    with _quiet(), contextlib.redirect_stderr(io.StringIO()):
        step("loading the tokenizer")
        tokenizer = attempt(path, lambda: AutoTokenizer.from_pretrained(directory, **files))
    prepare(tokenizer, context_length(keys))
    with _quiet(), contextlib.redirect_stderr(io.StringIO()):
        step("loading the weights")
        kind = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
        model, warned = load_weights(kind, directory, path, dtype=weights, **files)
    step("moving the model")
    model = model.to(device).eval()
    for token_ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        ends = token_list(path, token_ids) if ends is None else ends
    pad = tokenizer.pad_token_id
    # greedy: a checkpoint's own sampling settings would make two runs differ
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=ends[0] if pad is None and ends else pad
    )
    engine = enable(model, selection, num_pages=num_pages, adaptive=adaptive)
    speed_up_linear(model, engine.dispatcher.backend("decode"))
    return TextModel(
        model=model,
        tokenizer=tokenizer,
        engine=engine,
        context_length=context_length(keys),
        warnings=warned,
    )


def encode(tokenizer: Any, prompt: str, *, chat: bool) -> Tensor:
    """Tokenize a prompt as int64 [1, T], as a user's message where the tokenizer has a template.

    Raises UsageError for a prompt without tokens and for a template that fails or does not end.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give some text")
    template = bool(chat and tokenizer.chat_template)
    if template:
        try:
            prompt = render(tokenizer, prompt)
        except TemplateError as error:
            raise UsageError(f"the chat template fails: {error}; leave out --chat") from error
    try:
        ids = tokenizer(prompt, add_special_tokens=not template)["input_ids"]
    except Exception as error:  # a text or a vocabulary that the tokenizer cannot take
        raise UsageError(f"the tokenizer fails: {type(error).__name__}: {error}") from error
    if not ids:
        raise UsageError(f"the prompt {prompt[:100]!r} has no tokens in this model's vocabulary")
    return torch.tensor([ids], device="cpu")


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
    ContextLengthError and ModelConfigError before anything runs, OutOfPagesError.
    """
    length = prompt.shape[1]
    limit = new_tokens(text.context_length, length, max_new_tokens)
    vocab_size, largest = text.model.get_input_embeddings().num_embeddings, int(prompt.max())
    if largest >= vocab_size:
        raise ModelConfigError(
            f"the tokenizer gives token {largest}, the model knows {vocab_size}: they do not "
            "belong together; download the model again"
        )
    stream = TextStreamer(text.tokenizer, write)
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


def new_tokens(context: int | None, length: int, max_new: int | None) -> int:
    """Return how many tokens to generate after a prompt of `length`, None asked for no number.

    Raises UsageError for a number that no prompt leaves room for, ContextLengthError.
    """
    limit = MAX_TOKENS if context is None else context - 1
    if max_new is not None and not 1 <= max_new <= max(1, limit):
        raise UsageError(
            f"--max-new-tokens {max_new}: at least 1"
            + (f", at most {limit} in a context of {context}" if context and max_new > 1 else "")
        )
    if context is None:
        return max_new or MAX_NEW_TOKENS
    if length + (max_new or 1) > context:
        new = f" and {max_new} new tokens" if max_new else ""
        raise ContextLengthError(
            f"a prompt of {length} tokens{new} for a context of {context}; shorten the prompt"
            + (f" or ask for at most {context - length}" if max_new and length < context else "")
        )
    return max_new or min(MAX_NEW_TOKENS, context - length)


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
