"""The GDN and KDA cases of SGLang's attention tests, and what they need to run on attn_core."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Case = tuple[str, str, Callable[[], None]]  # group, name, test
SHAPE = {"max_context_len": 64}
TOLERANCE = {"atol": 3e-2, "rtol": 3e-2}  # the kit's own of GDN


class Running:
    """What the kit's runners do not tell a backend of the case that runs."""

    topk = 1


def cases(backend: str, device: str, drafts: int) -> Iterator[Case]:
    """Yield prompts, decode and verification of both kinds, eager and as a graph replays them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as gdn
    from sglang.test.kits.attention_unittest.attention_methods import kda_attention as kda
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graph
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    kinds: tuple[tuple[str, Any, Any], ...] = (
        ("gdn", gdn, gdn.GDNAttentionCase),
        ("kda", kda, kda.KDAAttentionCase),
    )
    test, common = unittest.TestCase(), {**SHAPE, "device": device}
    for kind, module, create in kinds:
        eager = getattr(module, f"run_{kind}_attention_case")
        replayed = getattr(graph, f"run_{kind}_cuda_graph_decode_case")
        for case in getattr(module, f"make_{kind}_cases")(backend):
            yield kind, case.name, functools.partial(eager, test, case, **common)
            if case.forward_mode.is_decode():
                size = {"cuda_graph_capture_batch_size": case.batch_size}
                replay = functools.partial(replayed, test, case, **common, **size)
                yield f"{kind} graph", case.name, replay
        for topk in (1, 2):
            case = create(
                name="tree" if topk > 1 else "chain",
                backend=backend,
                forward_mode=ForwardMode.TARGET_VERIFY,
                num_k_heads=2,
                num_v_heads=2,
                page_size=1,
                prefix_lens=(5, 16, 33),
                extend_lens=(drafts,) * 3,
            )
            for graphed, suffix in (("", ""), (" graph", "_cuda_graph")):
                run = getattr(verify, f"run_{kind}_eagle_verify{suffix}_case")
                more = {**common, **(TOLERANCE if kind == "kda" else {})}
                drafted = functools.partial(_verified, run, test, case, topk, more)
                yield f"verify {kind}{graphed}", case.name, drafted


def _verified(run: Any, test: Any, case: Any, topk: int, more: dict[str, Any]) -> None:
    with mock.patch.object(Running, "topk", topk):
        run(test, case, topk=topk, **more)


def prepare() -> None:
    """Let the tests create attn_core's linear backend; they make the layer itself afterwards.

    The kit's expected outputs of KDA's drafts leave out the activation of the convolution, which
    those of its prompts and of its decode have; it is put back.
    """
    import torch
    from attn_core.integrations.sglang.linear import HybridBackend, LinearBackend
    from attn_core.integrations.sglang.linear_layers import to_linear_layer
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.test.kits.attention_unittest.attention_methods import gdn_attention, kda_attention
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    class Backend(LinearBackend):
        module: Any = None

        def _attend(self, x: Any, module: Any, a: Any, b: Any) -> Any:
            if module is not self.module:
                self.module, self.layers[module.layer_id] = module, to_linear_layer(module)
            return super()._attend(x, module, a, b)

    def create(kind: str, runner: Any) -> Any:
        state = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
        heads, v_dim, k_dim = state.shape[2:]
        hk = runner.model_config.num_attention_heads
        biases = heads * (k_dim if kind == "kda" else 1)
        module = RadixLinearAttention(
            layer_id=0,
            num_q_heads=hk,
            num_k_heads=hk,
            num_v_heads=heads,
            head_q_dim=k_dim,
            head_k_dim=k_dim,
            head_v_dim=v_dim,
            A_log=torch.zeros(heads, device=state.device),
            dt_bias=torch.zeros(biases, device=state.device),
        )
        args = runner.server_args
        if args.speculative_num_draft_tokens:
            args.speculative_algorithm = "EAGLE"
            args.speculative_eagle_topk = Running.topk
            args.speculative_attention_mode = "decode"
        backend = Backend(runner, {0: to_linear_layer(module)}, None)
        backend.module = module
        return backend

    expected = verify.expected_kda_verify_output_from_inputs

    def activated(fixture: Any, case: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        x = inputs["mixed_qkv"]
        active = torch.nn.functional.silu(x.float()).to(x.dtype)
        return expected(fixture, case, {**inputs, "mixed_qkv": active}, *rest, **more)

    verify.expected_kda_verify_output_from_inputs = activated
    gdn_attention.GDNAttnBackend = functools.partial(create, "gdn")
    kda_attention.KDAAttnBackend = functools.partial(create, "kda")
    for tests in (gdn_attention, kda_attention):
        tests.HybridLinearAttnBackend = HybridBackend
