"""The flags that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from attn_core.errors import UsageError
from attn_core.selection.result import Overrides
from attn_core.spec.kinds import Kind
from attn_core.tools.env_vars import variable

DTYPES = ("bf16", "fp16", "fp32")
Name = str | None
Number = int | None
KV_DTYPES = ("auto", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp16", "fp32")


def flag(name: str, text: str, *, env: bool = True, also: str = "", most: int = 0) -> Any:
    """Declare one option; its environment variable is derived from its name.

    most: the largest number that it accepts, above any in use, so that a typo is refused at once.
    """
    names = [n for n in (name, also) if n]

    def within(value: Number) -> Number:
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name} {value}: at least 1, at most {most}")
        return value

    known = variable(name.partition("/")[0]) if env else None
    return typer.Option(*names, help=text, envvar=known, callback=within if most else None)


@dataclass(frozen=True, kw_only=True)
class BackendFlags:
    """The documented flags that choose backends."""

    attention_backend: Annotated[Name, flag("--attention-backend", "Backend for both phases.")] = (
        None
    )
    prefill_attention_backend: Annotated[
        Name, flag("--prefill-attention-backend", "Backend for prefill.")
    ] = None
    decode_attention_backend: Annotated[
        Name, flag("--decode-attention-backend", "Backend for decode.")
    ] = None
    mm_attention_backend: Annotated[
        Name, flag("--mm-attention-backend", "Backend for the vision tower.")
    ] = None
    linear_attn_backend: Annotated[
        Name, flag("--linear-attn-backend", "Backend for linear attention layers.")
    ] = None
    linear_attn_prefill_backend: Annotated[
        Name, flag("--linear-attn-prefill-backend", "… for their prefill.")
    ] = None
    linear_attn_decode_backend: Annotated[
        Name, flag("--linear-attn-decode-backend", "… for their decode.")
    ] = None
    nsa_prefill_backend: Annotated[
        Name,
        flag(
            "--nsa-prefill-backend",
            "Kernel of sparse MLA (dsa) for prefill.",
            also="--dsa-prefill-backend",
        ),
    ] = None
    nsa_decode_backend: Annotated[
        Name, flag("--nsa-decode-backend", "… for decode.", also="--dsa-decode-backend")
    ] = None
    page_size: Annotated[Number, flag("--page-size", "Tokens per KV page.", most=1 << 16)] = None
    kv_cache_dtype: Annotated[str, flag("--kv-cache-dtype", f"One of {', '.join(KV_DTYPES)}.")] = (
        "auto"
    )
    prefer: Annotated[
        list[str] | None, flag("--prefer", "NAME,…: rank these first, in this order.")
    ] = None
    allow: Annotated[list[str] | None, flag("--allow", "NAME,…: select only these.")] = None
    deny: Annotated[list[str] | None, flag("--deny", "NAME,…: never select these.")] = None

    def overrides(self) -> Overrides:
        """Return the overrides that the flags state."""
        allow = names(self.allow)
        if self.allow and not allow:
            raise UsageError(
                f"--allow {','.join(self.allow)!r} names no backend; name at least one, or leave "
                "the flag out to allow all"
            )
        return Overrides(
            attention_backend=self.attention_backend,
            prefill_attention_backend=self.prefill_attention_backend,
            decode_attention_backend=self.decode_attention_backend,
            mm_attention_backend=self.mm_attention_backend,
            linear_attn_backend=self.linear_attn_backend,
            linear_attn_prefill_backend=self.linear_attn_prefill_backend,
            linear_attn_decode_backend=self.linear_attn_decode_backend,
            nsa_prefill_backend=self.nsa_prefill_backend,
            nsa_decode_backend=self.nsa_decode_backend,
            prefer=names(self.prefer),
            allow=allow or None,
            deny=names(self.deny),
        )


@dataclass(frozen=True, kw_only=True)
class InputFlags(BackendFlags):
    """The flags that choose backends, and those that describe model, workload and machine."""

    model: Annotated[
        Path | None,
        flag("--model", "Model directory or config.json.", also="--model-path"),
    ] = None
    tp: Annotated[int, flag("--tp", "Tensor-parallel ranks.")] = 1
    dtype: Annotated[
        str | None, flag("--dtype", f"One of {', '.join(DTYPES)}; default: the model's, else bf16.")
    ] = None
    kind: Annotated[
        str | None,
        flag("--kind", f"Without --model: one of {', '.join(get_args(Kind))}.", env=False),
    ] = None
    head_dim: Annotated[Number, flag("--head-dim", "D of Q and K, without --model.", env=False)] = (
        None
    )
    v_head_dim: Annotated[Number, flag("--v-head-dim", "D of V, without --model.", env=False)] = (
        None
    )
    num_q_heads: Annotated[
        Number, flag("--num-q-heads", "Query heads, without --model.", env=False)
    ] = None
    num_kv_heads: Annotated[
        Number, flag("--num-kv-heads", "KV heads, without --model.", env=False)
    ] = None
    sliding_window: Annotated[
        Number, flag("--sliding-window", "Tokens that a token sees, itself included.", env=False)
    ] = None
    logit_cap: Annotated[
        float | None, flag("--logit-cap", "Soft cap of the logits.", env=False)
    ] = None
    sinks: Annotated[bool, flag("--sinks", "Learned attention sinks.", env=False)] = False
    speculative_attention_mode: Annotated[
        str | None,
        flag(
            "--speculative-attention-mode",
            "The phase whose backend verifies and drafts: prefill or decode.",
        ),
    ] = None
    speculative_eagle_topk: Annotated[
        Number,
        flag(
            "--speculative-eagle-topk",
            "Draft tokens per step; enables speculation.",
            most=1024,
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        Number,
        flag("--speculative-num-draft-tokens", "Tokens of a verification; default: 4.", most=1024),
    ] = None
    deterministic: Annotated[
        bool, flag("--deterministic", "Select deterministic backends only.")
    ] = False
    shared_prefix: Annotated[
        bool, flag("--shared-prefix", "Decode and verify with backends that read prefixes once.")
    ] = False
    device: Annotated[
        str | None,
        flag("--device", "TYPE[:ARCH], h100 or h200, such as cuda:sm90; default: this machine's."),
    ] = None
    runtime_version: Annotated[
        str | None, flag("--runtime-version", "Version of CUDA, ROCm or CANN.")
    ] = None
    assume_installed: Annotated[
        list[str] | None,
        flag("--assume-installed", "Libraries to assume: all, or NAME[==VERSION],…"),
    ] = None
    profile: Annotated[
        str | None,
        flag(
            "--profile",
            "Measured costs: a file of `attn tune`, or none; default: its own, else shipped.",
        ),
    ] = None
    workload: Annotated[
        str | None,
        flag("--workload", "JSON, or a file of it: shares of prompts and requests, and more."),
    ] = None


def names(values: list[str] | None) -> tuple[str, ...]:
    """Split NAME,NAME and repeated flags into one ordered list."""
    return tuple(n.strip() for v in values or () for n in v.split(",") if n.strip())


def takes(flags: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of `flags` as options, passed as one object in first place."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = list(signature.parameters.values())[1:]
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in own]
        shared_hints = get_type_hints(flags, include_extras=True)
        shared = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=shared_hints[f.name],
            )
            for f in fields(flags)
        ]

        def run(**kwargs: Any) -> None:
            values = {f.name: kwargs.pop(f.name) for f in fields(flags)}
            command(flags(**values), **kwargs)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        ordered = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return run

    return wrap
