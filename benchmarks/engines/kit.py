"""Run the attention tests that SGLang ships for its own backends with attn_core.

Run: `python -m benchmarks.engines.kit [--backend attn_core] [--device cuda] [--only gdn kda]
[--cases chain] [--out FILE.json]`.
The cases, runners and expected outputs are those of sglang.test.kits.attention_unittest in SGLang
0.5.16: dense, windowed and MLA attention, sparse MLA (DSA), dual chunk attention, GDN and KDA
layers, decode as a graph replays it, chains and trees of drafts.
Prints one line for each case. Exit code 0: none failed; a refusal is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.engines import kit_linear, kit_sparse, record
from benchmarks.engines.configurations import OURS

HEAD_DIM, CONTEXT = 64, 128
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only latents that kernels take
DRAFTS = 3  # the kit has a tree of this size
Case = tuple[str, str, Callable[[], None]]  # group, name, test


def cases(backend: str, device: str) -> Iterator[Case]:
    """Yield every case that the kit has for kinds of layers that attn_core serves."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graph
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    test = unittest.TestCase()
    common: dict[str, Any] = {"device": device, "max_context_len": CONTEXT}
    of_dense, of_mla = {**common, "head_dim": HEAD_DIM}, {**common, **LATENT}

    def call(function: Any, case: Any, **more: Any) -> Callable[[], None]:
        return lambda: function(test, case, **more)

    layout = dense.make_loc_fn

    def in_order(function: Any, case: Any, **more: Any) -> Callable[[], None]:
        """The kit writes prefixes in order, over slots that it shuffled: not with pages of one."""

        def run() -> None:
            with mock.patch.object(dense, "make_loc_fn", lambda _, **m: layout("contiguous", **m)):
                function(test, case, **more)

        return run

    windowed = (
        *dense.make_swa_no_prefix_input_config_cases(backend),
        *dense.make_swa_prefix_input_config_cases(backend),
    )
    for group, result in (("dense", dense.make_dense_cases(backend)), ("window", windowed)):
        for case in result:
            yield group, case.name, call(dense.run_dense_attention_case, case, **of_dense)
            if case.forward_mode.is_decode():
                replay = in_order(graph.run_dense_cuda_graph_decode_case, case, **of_dense)
                yield f"{group} graph", case.name, replay
    for case in mla.make_mla_cases(backend):
        yield "mla", case.name, call(mla.run_mla_attention_case, case, **of_mla)
        if case.forward_mode.is_decode():
            replay = in_order(graph.run_mla_cuda_graph_decode_case, case, **of_mla)
            yield "mla graph", case.name, replay
    common = {
        "backend": backend,
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "num_heads": 4,
        "prefix_lens": (5, 16, 33),
        "extend_lens": (DRAFTS,) * 3,
    }
    for topk, page_size in ((1, 1), (1, 16), (2, 1)):
        name = f"{'tree' if topk > 1 else 'chain'}_page_size_{page_size}"
        with_heads = dense.DenseAttentionCase(
            name=name, num_kv_heads=2, page_size=page_size, **common
        )
        latent = mla.MLAAttentionCase(name=name, page_size=page_size, **common)
        for kind in ("eagle", "ngram"):
            more = {**of_dense, "topk": topk, "spec_kind": kind}
            yield (
                f"verify {kind}",
                name,
                call(verify.run_dense_spec_verify_case, with_heads, **more),
            )
            replay = in_order(verify.run_dense_spec_verify_cuda_graph_case, with_heads, **more)
            yield f"verify {kind} graph", name, replay
        more = {**of_mla, "topk": topk}
        yield "verify mla", name, call(verify.run_mla_eagle_verify_case, latent, **more)
        replay = in_order(verify.run_mla_eagle_verify_cuda_graph_case, latent, **more)
        yield "verify mla graph", name, replay
    yield from kit_sparse.cases(backend, device)
    yield from kit_linear.cases(backend, device, DRAFTS)


def prepare() -> None:
    """Let the kit's runners, which have no model and no speculation, create attn_core.

    The kit's masks have a column for every token of the context; attn_core asks SGLang for compact
    ones, so its masks are made compact. What a server keeps in static memory the kit makes anew
    for a replay; it is copied.
    """
    import torch
    from attn_core.integrations.sglang import register
    from attn_core.integrations.sglang.backend import AttnCoreBackend
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    class Backend(kit_sparse.Sparse, AttnCoreBackend):
        def init_forward_metadata_out_graph(
            self, forward_batch: Any, in_capture: bool = False
        ) -> None:
            if in_capture:
                self.static_batch = forward_batch
            else:
                for name in ("out_cache_loc", "positions"):
                    getattr(self.static_batch, name).copy_(getattr(forward_batch, name))
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def create(runner: Any) -> Any:
        config, pool = runner.model_config, runner.token_to_kv_pool
        runner.is_draft_worker = False
        kit_sparse.as_files_have_it(config.hf_config)
        head_dim = pool.get_key_buffer(0).shape[-1]
        latent: dict[str, int] = {}
        heads = config.num_key_value_heads
        if runner.use_mla_backend:
            heads = 1
            latent = {"v_head_dim": LATENT["kv_lora_rank"]}
        runner.model = torch.nn.Module()
        runner.model.attn = RadixAttention(
            num_heads=config.num_attention_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            num_kv_heads=heads,
            layer_id=0,
            sliding_window_size=getattr(runner, "sliding_window_size", None) or -1,
            **latent,
        )
        args = runner.server_args
        args.disaggregation_mode = "null"
        args.disable_radix_cache = True  # sparse prompts of dual chunk attention come whole
        if args.speculative_num_draft_tokens:
            args.speculative_algorithm = "EAGLE"
            args.speculative_eagle_topk = 2  # a chain is a tree too
            args.speculative_attention_mode = "decode"
        return Backend(runner)

    full = verify._make_custom_masks

    def compact(case: Any, *, topk: int, device: str) -> Any:
        by_request, _ = full(case, topk=topk, device=device)
        return by_request, torch.cat([mask[:, -DRAFTS:].reshape(-1) for mask in by_request])

    register()
    ATTENTION_BACKENDS[OURS] = create
    verify._make_custom_masks = compact
    kit_linear.prepare()


def outcome(test: Callable[[], None]) -> str:
    """Run one case: "passed", or "refused", "skipped" or "failed" with the reason."""
    from attn_core import AttnError

    try:
        test()
    except AttnError as error:
        return f"refused: {error}"
    except unittest.SkipTest as error:
        return f"skipped: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default=OURS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the groups' names")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the cases' names")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.backend == OURS:
        prepare()
    rows = []
    for group, name, test in cases(args.backend, args.device):
        by_group = any(part in group for part in args.only)
        if not (by_group and any(part in name for part in args.cases)):
            continue
        message = outcome(test)
        rows.append({"group": group, "case": name, "outcome": message})
        print(f"{group:20} {name:42} {' '.join(message.split())[:200]}", flush=True)
    count = {kind: sum(r["outcome"].startswith(kind) for r in rows) for kind in KINDS}
    print(json.dumps(count))
    if args.out:
        head = {"date": datetime.date.today().isoformat(), "versions": record.installed()}
        record.save(args.out, {**head, "backend": args.backend, "count": count, "rows": rows})
    return 1 if count["failed"] or not count["passed"] else 0


KINDS = ("passed", "refused", "skipped", "failed")


if __name__ == "__main__":
    sys.exit(main())
