"""What reading shared prefixes once brings to a workload, by the rule that forms groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from attn_core.costs.shared_prefix import (
    MAX_REQUESTS,
    fits_tile,
    largest_tile,
    partial_bytes,
    shared_granule,
    token_values,
)
from attn_core.costs.workload import Workload
from attn_core.selection.result import Selection
from attn_core.spec.kinds import Role
from attn_core.spec.requirements import LayerRequirements

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a value; others have one


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Bytes of K and V that a pass reads in a layer: requests over one prompt, and each on its own.

    shared: tokens of the prompt that are read once. Partials count with the bytes.
    """

    requests: int
    prompt: int
    shared: int
    bytes: int
    alone_bytes: int

    def __str__(self) -> str:
        batch = f"{self.requests} requests over a prompt of {self.prompt} tokens"
        if not self.shared:
            return f"{batch} share too little of it"
        shared_mb, alone_mb = self.bytes / 1e6, self.alone_bytes / 1e6
        return f"{batch} read {shared_mb:.1f} MB a layer, not {alone_mb:.1f}"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the requests of a role share what they read in layers of one form.

    least: the fewest tokens that neighbours have to share; groups end at multiples of it. None
    where no groups are formed, or where the layer is unknown; `why` says so.
    """

    role: Role
    layer: str
    least: int | None
    why: str = ""
    gains: tuple[Gain, ...] = ()

    def __str__(self) -> str:
        if self.least is None:
            return f"{self.role}: {self.why}"
        pages = f"{self.role}: {self.layer} read once what neighbours in a batch share"
        return "; ".join((f"{pages}, from {self.least} tokens on", *map(str, self.gains)))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def sharing_of(selection: Selection, workload: Workload) -> tuple[Sharing, ...]:
    """Return what roles share, one for each form of layers; () unless it was asked for."""
    needs = selection.requirements
    if not needs.shared_prefix:
        return ()
    roles: tuple[Role, ...] = ("decode", "verify")
    sharing_roles = [
        r for r in roles if r in selection.roles and selection.roles[r].row.shared_prefix
    ]
    layers = tuple(dict.fromkeys(needs.softmax_layers))
    return tuple(
        _sharing(selection, role, layer, workload) for role in sharing_roles for layer in layers
    )


def _sharing(
    selection: Selection, role: Role, layer: LayerRequirements, workload: Workload
) -> Sharing:
    needs, drafts = selection.requirements, selection.requirements.speculation
    queries = drafts.num_draft_tokens if role == "verify" and drafts else 1
    name = f"{layer.kind} layers"
    if layer.head_dim is not None:
        name += f" of head dim {layer.head_dim}"
    alone = "read every request on its own"
    if needs.deterministic:
        reason = f"{name} {alone}: in deterministic mode no bit may depend on the neighbours"
        return Sharing(role=role, layer=name, least=None, why=reason)
    if layer.sliding_window or layer.cross or layer.dual_chunk:
        kind = "a window" if layer.sliding_window else "cross" if layer.cross else "dual chunks"
        reason = f"{name} with {kind} {alone}"
        return Sharing(role=role, layer=name, least=None, why=reason)
    dim, q, kv = layer.head_dim, layer.num_q_heads, layer.num_kv_heads
    if layer.kind == "mla":  # absorbed
        kv = 1
    if not (dim and q and kv):
        reason = (
            "how many tokens neighbours have to share depends on the layer; give --head-dim, "
            "--num-q-heads and --num-kv-heads, or --model"
        )
        return Sharing(role=role, layer=name, least=None, why=reason)
    rows, v_dim = queries * (q // kv), layer.v_head_dim or dim
    width, page = BYTES.get(selection.kv_cache_dtype, 1), selection.page_size or 1
    requests = _requests(workload)
    tile = largest_tile(selection.device.arch, dim, v_dim, width, page, requests)
    if not fits_tile(rows, tile):
        reason = f"{name} {alone}: {rows} query rows a KV head (at most {tile // 2} are shared)"
        return Sharing(role=role, layer=name, least=None, why=reason)
    least = shared_granule(rows, dim, v_dim, width)
    sizes = kv, token_values(dim, v_dim) * width, partial_bytes(rows, v_dim)
    gains = tuple(_gains(workload, least, page, *sizes))
    return Sharing(role=role, layer=name, least=least, gains=gains)


def _requests(workload: Workload) -> int:
    """Return the largest batch of a workload, as far as one plan goes."""
    return min(max(n for n, share in workload.requests.items() if share > 0), MAX_REQUESTS)


def _gains(
    workload: Workload, granule: int, page: int, kv_heads: int, token: int, partials: int
) -> Iterator[Gain]:
    """Yield what each prompt of a workload brings where most requests of it run together."""
    requests = _requests(workload)
    if requests < 2:
        return
    for prompt, share in sorted(workload.prompts.items()):
        if share <= 0:
            continue
        shared = prompt // page * page // granule * granule
        tokens = requests * (prompt + workload.output // 2)
        saved = (requests - 1) * shared * token - (requests * partials if shared else 0)
        yield Gain(
            requests=requests,
            prompt=prompt,
            shared=shared,
            bytes=kv_heads * (tokens * token - saved),
            alone_bytes=kv_heads * tokens * token,
        )
