"""Where linear attention launches kernels: name → a call with tensors that have no memory."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from attn_core.backends.triton.linear.launch import LinearArguments, commit, decode, verify
from attn_core.backends.triton.linear.prefill import plan_prefill, prefill
from attn_core.errors import UnsupportedError
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Phase
from attn_core.testing.plan import usable_rows
from launch_site import Chip, NotDeclared

META = torch.device("meta")
SLOTS, BATCH = 80, 3
LENGTHS = (100, 30, 1)
QWEN = {"kind": "gdn", "heads": (16, 32), "dims": (128, 128)}
KIMI = {"kind": "kda", "heads": (32, 32), "dims": (128, 128)}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


def int32(n):
    return meta(n, dtype=torch.int32)


def make_layer(kind, heads, dims, bound=None):
    (hk, hv), (k, v) = heads, dims
    bias = (hv, k) if kind == "kda" else (hv,)
    weights = [meta(*shape, dtype=torch.float32) for shape in ((hv,), bias)]
    gate = SimpleNamespace(
        A_log=weights[0], dt_bias=weights[1], lower_bound=bound, neg_eigval=False
    )
    return SimpleNamespace(
        layer_id=0, num_k_heads=hk, num_v_heads=hv, head_k_dim=k, head_v_dim=v, kind=kind,
        scale=k**-0.5, qk_norm=1e-6, gate=gate,
    )  # fmt: skip


def launch(operation, chip, *, model, drafts=4, tree=False, store=torch.float32, **more):
    """Launch an operation for parts of one projection and the states of one layer of several."""
    checkpoints, alone = more.pop("checkpoints", None), more.pop("alone", False)
    ahead, fused = more.pop("ahead", False), more.pop("fused", False)
    tokens_dtype = more.pop("tokens", torch.bfloat16)
    layer = make_layer(**model, **more)
    (hk, hv), (k, v) = model["heads"], model["dims"]
    per_head = (hv, k) if layer.kind == "kda" else (hv,)
    n = {"decode": 1, "prefill": 0}.get(operation, drafts)
    total = BATCH * n or sum(LENGTHS)
    packed = meta(total, 2 * hk * k + hv * v, dtype=tokens_dtype)
    parts = packed.split([hk * k, hk * k, hv * v], 1)
    tokens = [x.unflatten(1, (h, -1)) for x, h in zip(parts, (hk, hk, hv), strict=True)]
    tokens += [meta(total, *per_head), meta(total, hv)]
    states = meta(2, SLOTS, hv, v, k, dtype=store)
    kept, slots = LinearArguments.of(layer, chip.arch), int32(BATCH)
    dims = ((hv, v), (hk, k), per_head)
    records = tuple(meta(2, SLOTS, drafts, *x, dtype=torch.float32) for x in dims)
    mask = meta(BATCH, drafts, drafts, dtype=torch.bool) if tree else None
    if operation == "decode":
        decode(kept, *tokens, states[0], slots)
    elif operation == "verify":
        first = tuple(x[0] for x in records)
        verify(kept, *tokens, states[0], first, slots, tree_mask=mask)
    elif operation == "commit":
        commit(kept, states, records, slots, slots, tree_mask=mask)
    else:
        plan = plan_prefill(kept, LENGTHS, dtype=tokens_dtype, device=META)
        processors = 1000 if alone or ahead else 1
        plan = dataclasses.replace(plan, processors=processors, ahead=ahead, fused=fused)
        spots = int32(plan.num_chunks) if checkpoints else None
        prefill(kept, *tokens, states[0], slots, plan, checkpoints=spots)


@dataclasses.dataclass(frozen=True)
class LinearSite:
    """One operation of linear attention. launched: the further arguments of `launch`."""

    operation: str
    model: Mapping[str, Any]
    launched: Mapping[str, Any]

    CELLS: ClassVar = {"verify": "target_verify", "commit": "target_verify"}

    @property
    def kind(self) -> str:
        """gdn or kda."""
        return self.model["kind"]

    @property
    def cells(self) -> frozenset[str]:
        """The cell of the support matrix whose kernels these are."""
        return frozenset([self.CELLS.get(self.operation, self.operation)])

    def row(self, chip: Chip) -> Capabilities:
        """Return the row that is asked. Raises NotDeclared or UnsupportedError without one."""
        for row in usable_rows(chip.spec, self.kind, chip.device, chip.libraries):
            has = {"prefill": Phase.PREFILL in row.phases, "decode": Phase.DECODE in row.phases}
            if has.get(self.operation, row.max_verify_topk >= 1):
                return row
        raise NotDeclared(f"no row for {self.operation} of {self.kind}")

    def __call__(self, chip: Chip) -> None:
        """Launch it where a row declares it."""
        try:
            self.row(chip)
        except UnsupportedError as error:
            raise NotDeclared(str(error)) from None
        launch(self.operation, chip, model=self.model, **self.launched)


BF16 = {"store": torch.bfloat16}
LINEAR = {
    name: LinearSite(operation, model, more)
    for name, operation, model, more in (
        ("gdn-decode", "decode", QWEN, {}),
        ("gdn-decode-bf16", "decode", QWEN, BF16),
        ("gdn-verify", "verify", QWEN, {}),
        ("gdn-verify-tree", "verify", QWEN, {"drafts": 8, "tree": True}),
        ("gdn-verify-16", "verify", QWEN, {"drafts": 16}),
        ("gdn-commit", "commit", QWEN, {}),
        ("gdn-commit-tree", "commit", QWEN, {"drafts": 8, "tree": True}),
        ("gdn-prefill", "prefill", QWEN, {}),
        ("gdn-prefill-alone", "prefill", QWEN, {"alone": True}),
        ("gdn-prefill-ahead", "prefill", QWEN, {"ahead": True}),
        ("gdn-prefill-fused", "prefill", QWEN, {"fused": True}),
        ("gdn-prefill-64", "prefill", QWEN | {"dims": (64, 128)}, {}),
        ("gdn-prefill-bf16", "prefill", QWEN, {"checkpoints": True, **BF16}),
        ("gdn-prefill-fp16", "prefill", QWEN, {"tokens": torch.float16}),
        ("kda-decode", "decode", KIMI, {}),
        ("kda-verify", "verify", KIMI, {}),
        ("kda-verify-tree", "verify", KIMI, {"drafts": 8, "tree": True}),
        ("kda-commit", "commit", KIMI, {}),
        ("kda-prefill", "prefill", KIMI, {}),
        ("kda-prefill-alone", "prefill", KIMI, {"alone": True}),
        ("kda-prefill-fp16", "prefill", KIMI, {"tokens": torch.float16}),
        ("kda-prefill-bounded", "prefill", KIMI, {"bound": -5.0}),
    )
}
