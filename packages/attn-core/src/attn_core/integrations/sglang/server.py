"""What SGLang's server arguments mean for attention, and what attn-core does not serve."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from attn_core.errors import UnsupportedError
from attn_core.selection.checks import LINEAR_ARGUMENTS
from attn_core.spec.requirements import Speculation
from attn_core.tools.env_vars import variable

NAME = "attn_core"  # of --attention-backend
TESTED = SpecifierSet(">=0.5.15,<0.5.18")
TREES = SpecifierSet("==0.5.16.*")  # others build the masks of draft trees in other ways
DRAFTS = SpecifierSet("==0.5.16.*")  # whose draft workers call attn_core's backends
SPARSE = SpecifierSet("==0.5.16.*")  # whose indexers and pool of index keys were read
LINEAR = SpecifierSet("==0.5.16.*")  # whose pool of states and passes were read
CHUNKED = SpecifierSet("==0.5.16.*")  # whose rotary embedding of dual chunk attention was read
SPLIT = SpecifierSet("==0.5.16.*")  # whose slots and groups of decode context parallelism were read
DRAFTED = ("EAGLE", "EAGLE3", "STANDALONE")  # the algorithms of those workers
# SGLang's arguments that change what a pass is, and what to do without each
REFUSED: Mapping[str, str] = {
    "enable_two_batch_overlap": "leave out --enable-two-batch-overlap",
    "enable_pdmux": "leave out --enable-pdmux",
    "enable_hisparse": "leave out --enable-hisparse",
    "enable_unified_memory": "leave out --enable-unified-memory",
    "enable_prefill_cp": "leave out --enable-prefill-cp",
}
REFUSED_LINEAR: Mapping[str, str] = {  # what changes where SGLang keeps states
    "enable_linear_replayssm": "leave out --enable-linear-replayssm",
    "enable_gdn_replayssm_spec": "leave out --enable-gdn-replayssm-spec",
    "enable_page_major_kv_layout": "leave out --enable-page-major-kv-layout",
    "enable_unified_memory": "leave out --enable-unified-memory",
    "enable_two_batch_overlap": "leave out --enable-two-batch-overlap",
}
LINEAR_DEFAULT = "triton"  # of --linear-attn-backend


def has_version(tested: SpecifierSet) -> bool:
    """Say whether the installed SGLang is one of these releases."""
    return tested.contains(importlib.metadata.version("sglang"), prereleases=True)


def check_version(args: Any) -> None:
    """Raise UnsupportedError for a release of SGLang that the adapter was not tested with."""
    trees = draft_shape(args)[0] > 1
    tested = TREES if trees else TESTED
    if not has_version(tested):
        raise UnsupportedError(
            f"SGLang {importlib.metadata.version('sglang')} with --attention-backend {NAME}"
            f"{' and draft trees' if trees else ''} (tested with {tested}); install a tested "
            f"release{', draft chains (topk 1)' if trees else ''} or a newer attn-core"
        )


def verifies(args: Any) -> bool:
    """Say whether attn-core scores the drafts of a server with these arguments."""
    if args.speculative_algorithm is None:
        return False
    prefill, decode = args.get_attention_backends()
    return bool((decode if args.speculative_attention_mode == "decode" else prefill) == NAME)


def serves_linear(args: Any) -> bool:
    """Say whether attn-core serves the linear layers of a hybrid model.

    It does where it is named, and beside its own attention where SGLang's default is left alone:
    "triton" named for both phases keeps SGLang's kernels, as any other name does. Raises
    UnsupportedError where it is named for one phase only.
    """
    base, *phases = (getattr(args, name, None) for name in LINEAR_ARGUMENTS)
    names = {phase or base for phase in phases}
    if NAME in names:
        if len(names) > 1:
            raise UnsupportedError(
                f"linear layers with {' and '.join(sorted(map(str, names)))} for the two phases: "
                f"attn_core serves both or none; use --linear-attn-backend {NAME}"
            )
        return True
    unnamed = base == LINEAR_DEFAULT and not any(phases)
    return unnamed and set(args.get_attention_backends()) == {NAME} and has_version(LINEAR)


def names_linear(args: Any) -> bool:
    """Say whether an argument names attn-core for linear layers."""
    return any(getattr(args, name, None) == NAME for name in LINEAR_ARGUMENTS)


def check_linear_arguments(args: Any) -> None:
    """Raise UnsupportedError for what the adapter does not serve beside linear layers."""
    if not has_version(LINEAR):
        raise UnsupportedError(
            f"linear layers on {NAME} with SGLang {importlib.metadata.version('sglang')} (tested "
            f"with {LINEAR}); use another --linear-attn-backend"
        )
    for name, remedy in REFUSED_LINEAR.items():
        if getattr(args, name, False):
            raise UnsupportedError(
                f"SGLang's {name} with linear layers on {NAME}; {remedy}, or name another backend "
                "by --linear-attn-prefill-backend and --linear-attn-decode-backend"
            )


def drafts(args: Any, phase: str) -> bool:
    """Say whether attn-core serves the draft model's passes of "prefill" or of "decode"."""
    prefill, decode = args.get_attention_backends()
    name = args.speculative_draft_attention_backend or (decode if phase == "decode" else prefill)
    return bool(name == NAME)


def check_draft_model(args: Any) -> None:
    """Raise UnsupportedError for a draft model that the adapter does not serve."""
    remedy = (
        "name another backend by --speculative-draft-attention-backend: fa3, flashinfer, triton"
    )
    if not has_version(DRAFTS):
        raise UnsupportedError(
            f"a draft model on {NAME} with SGLang {importlib.metadata.version('sglang')} (tested "
            f"with {DRAFTS}); {remedy}"
        )
    algorithm, layered = (
        args.speculative_algorithm,
        getattr(args, "enable_multi_layer_eagle", False),
    )
    if algorithm not in DRAFTED or layered:
        raise UnsupportedError(
            f"the draft model of {'multi-layer ' * layered}{algorithm} on {NAME} (serves "
            f"{', '.join(DRAFTED)} with one draft model); {remedy}"
        )


def draft_shape(args: Any) -> tuple[int, int]:
    """Return (topk, drafts per request) of a server; (0, 0) without speculation."""
    if args.speculative_algorithm is None:
        return 0, 0
    topk = args.speculative_eagle_topk or 1
    if args.speculative_algorithm == "NGRAM":
        topk = args.speculative_ngram_max_bfs_breadth
    return topk, args.speculative_num_draft_tokens


def captures(args: Any, device_type: str) -> bool:
    """Say whether a server captures decode, or verification, in CUDA graphs."""
    off = any(getattr(args, x, False) for x in ("disable_cuda_graph", "disable_decode_cuda_graph"))
    return device_type == "cuda" and not off and _graphs(args, "decode") != "disabled"


def captures_prefill(args: Any) -> bool:
    """Say whether a server captures parts of prefill."""
    return _graphs(args, "prefill") not in ("", "disabled")


def _graphs(args: Any, phase: str) -> str:
    """Return how a phase is captured: "full", "breakable", "disabled" …; "" if not resolved."""
    config = getattr(getattr(args, "cuda_graph_config", None), phase, None)
    return str(getattr(config, "backend", "") or "")


def speculation(args: Any, topk: int, tokens: int | None = None) -> Speculation | None:
    """Return what select() must know of the server's speculation.

    topk: that of the trees that the model attends to; 1 for a draft model whose branches are rows.
    tokens: of such a tree, by default those that the server verifies.
    """
    drafts = tokens or draft_shape(args)[1]
    if not drafts:
        return None
    return Speculation(topk=topk, num_draft_tokens=drafts, mode=args.speculative_attention_mode)


def check_arguments(args: Any) -> None:
    """Raise UnsupportedError for what the adapter does not serve, with the argument to change."""
    for name, remedy in REFUSED.items():
        if getattr(args, name, False):
            raise UnsupportedError(f"SGLang's {name} with --attention-backend {NAME}; {remedy}")
    if getattr(args, "disaggregation_mode", "null") != "null":
        raise UnsupportedError(
            f"prefill/decode disaggregation with --attention-backend {NAME}; name another backend"
        )
    if getattr(args, "attn_cp_size", 1) > 1:
        raise UnsupportedError(
            f"--attn-cp-size {args.attn_cp_size} with --attention-backend {NAME} (supports 1: the "
            "queries of a prompt stay together); leave it out, or name a backend that splits them"
        )
    split = getattr(args, "dcp_size", 1)
    if split > 1 and (args.speculative_algorithm or set(args.get_attention_backends()) != {NAME}):
        raise UnsupportedError(
            f"--dcp-size {split} with speculation or with another backend for one phase (serves "
            f"plain prefill and decode); use --attention-backend {NAME} alone, or leave out "
            "--dcp-size"
        )
    if _graphs(args, "prefill") == "full":
        raise UnsupportedError(
            f"full CUDA graphs of prefill with --attention-backend {NAME}; choose "
            "--cuda-graph-backend-prefill breakable or disabled"
        )
    names = set(args.get_attention_backends())
    if len(names) > 1 and NAME in names and draft_shape(args)[0] > 1:
        raise UnsupportedError(
            f"draft trees with {' and '.join(sorted(names))} for the two phases: SGLang hands its "
            f"tree mask to one backend only; use --attention-backend {NAME} for both and name "
            f"attn-core's backends by {variable('--prefill-attention-backend')} and "
            f"{variable('--decode-attention-backend')}"
        )


def check_sparse(args: Any, config: Any) -> int:
    """Return the keys that a query of a model of sparse MLA (DSA) selects.

    config: of transformers. Raises UnsupportedError for what is not served beside sparse MLA.
    """
    topk: int = config.index_topk
    refused = {
        f"SGLang {importlib.metadata.version('sglang')} (tested with {SPARSE})": not has_version(
            SPARSE
        ),
        "another backend for one phase": set(args.get_attention_backends()) != {NAME},
        "speculation": args.speculative_algorithm is not None,
        "keys that are always selected (index_init_tokens, index_local_tokens)": any(
            getattr(config, f"index_{x}_tokens", 0) for x in ("init", "local")
        ),
        "CUDA graphs of prefill (--cuda-graph-backend-prefill disabled leaves them out)": (
            captures_prefill(args)
        ),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(
                f"{' '.join(config.architectures)} has sparse MLA (DSA, index_topk {topk}), which "
                f"{NAME} does not serve with {what}; use --attention-backend dsa"
            )
    return topk


def use_short_masks(args: Any) -> None:
    """Let SGLang's n-gram worker build masks of the drafts alone, where attn-core verifies."""
    if verifies(args) and args.speculative_algorithm == "NGRAM":
        from sglang.srt.speculative import ngram_worker

        ngram_worker.USE_FULL_MASK = False  # read in every step


def check_tree_masks(args: Any) -> None:
    """Raise UnsupportedError if SGLang's workers build other tree masks than attn-core reads."""
    if not verifies(args) or draft_shape(args)[0] == 1:
        return
    from sglang.srt.speculative import eagle_utils

    names = ("eagle_worker_v2", "multi_layer_eagle_worker_v2", "standalone_worker_v2")
    workers = [sys.modules.get(f"sglang.srt.speculative.{name}") for name in names]
    for module in (eagle_utils, *filter(None, workers)):
        mode = getattr(module, "default_tree_mask_mode", None)
        if mode is not None and mode().name != "QLEN_ONLY":
            raise UnsupportedError(
                f"{module.__name__} builds {mode().name} tree masks, attn-core reads QLEN_ONLY: "
                "its hook was not applied; remove the plugin that imports this module earlier, or "
                "use draft chains (--speculative-eagle-topk 1)"
            )
