"""Backends with a planted fault, and passes that show it in a dispatcher."""

from __future__ import annotations

import dataclasses

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.pool import KVPool
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import without_host_lengths
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.kinds import SERVING
from attn_core.testing.oracle import tree_mask
from attn_core.trust.reproducer import Setting
from attn_core.trust.rerun import device_of, fitting_row
from reference import LATENT, ROW, Reference

LONG = 100  # tokens, beyond which Lengthy is wrong
TREE = (-1, 0, 0, 1)


class Windowed(Reference):
    """Sees one token too many in a window."""

    def in_window(self, key, query, window):
        return key >= query - window


class Lengthy(Reference):
    """Takes another scale for requests of more than 100 tokens."""

    def attend(self, q, k, v, layer, rows):
        if len(k) > LONG:
            layer = dataclasses.replace(layer, scale=layer.scale * 1.5)
        return super().attend(q, k, v, layer, rows)


class Swapped(Reference):
    """Returns the log-sum-exp in base 2."""

    def natural(self, lse):
        return lse / torch.log(torch.tensor(2.0))


class Crashing(Reference):
    """Fails in its plan."""

    def init_forward_metadata(self, batch):
        raise ValueError("no plan")


FAULTS = {"windowed": Windowed, "lengthy": Lengthy, "swapped": Swapped, "crashing": Crashing}


def registry() -> Registry:
    """Return the installed backends, and the faulty ones beside a right `reference`."""
    known, rows = load_plugins(), [ROW, LATENT]
    specs = [BackendSpec(name="reference", capabilities=rows, create="reference:Reference")]
    for name, kind in FAULTS.items():
        create = f"faulty:{kind.__name__}"
        specs.append(BackendSpec(name=name, capabilities=rows, create=create))
    mine = {("softmax", spec.name): spec for spec in specs}
    return Registry(backends={**known.backends, **mine}, origins=known.origins)


def layers(kind="mha", count=2, **changes):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
    if kind == "mla":
        shape = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 96, "v_head_dim": 64}
    shape |= {"scale": shape["head_dim"] ** -0.5, **changes}
    return tuple(AttentionLayer(layer_id=i, **shape) for i in range(count))


class Served:
    """A dispatcher over one backend for all roles, and passes over its random cache."""

    def __init__(
        self, name, shadow=None, *, kind="mha", every_layer=None, dtype="fp32", store=None,
        page_size=16, layout="NHD", scales=None, fused=False, device="cpu", pages=80,
    ):  # fmt: skip
        self.layers = every_layer or layers(kind)
        self.dtype, self.page_size = TORCH_DTYPES[dtype], page_size
        self.pool = KVPool(
            self.layers, num_pages=pages, page_size=page_size, kv_cache_dtype=store or dtype,
            kind=kind, layout=layout, scales=scales, device=device,
        )  # fmt: skip
        self.rng = torch.Generator().manual_seed(5)
        for layer in self.layers:
            cache = self.pool.layer(layer.layer_id)
            for part, _ in cache.parts():
                if part.dtype != torch.uint8:
                    part.copy_(torch.randn(part.shape, generator=self.rng).to(part.dtype))
        known, on = registry(), torch.device(device)
        spec = known.get(name)
        setting = Setting(kind=kind, dtype=dtype, kv_cache_dtype=store or dtype)
        row = fitting_row(
            spec, known, setting, self.layers, page_size=page_size, layout=layout,
            phases=sorted(SERVING, key=str), topk=0, device=device_of(on),
        )  # fmt: skip
        row = dataclasses.replace(row, fused_kv_write=fused or row.fused_kv_write)
        config = BackendConfig(
            name=name, row=row, layers=self.layers, page_size=page_size, dtype=dtype,
            kv_cache_dtype=store or dtype, device=on, topk=2, num_draft_tokens=len(TREE),
        )  # fmt: skip
        backend = create_backend(spec, config)
        roles = ("prefill", "decode", "verify", "draft")
        self.dispatcher = HybridDispatcher(dict.fromkeys(roles, backend), self.pool, shadow=shadow)

    def batch(self, mode, query_lens, seq_lens, *, host=True):
        spec = None
        if mode is ForwardMode.TARGET_VERIFY:
            mask = torch.stack([tree_mask(TREE)] * len(seq_lens))
            mask = mask.to(self.pool.device)
            spec = SpecInfo(topk=2, num_draft_tokens=len(TREE), tree_mask=mask)
        ids = torch.randperm(self.pool.layer(0).num_pages - 1, generator=self.rng) + 1
        width = -(-max(seq_lens) // self.page_size)
        table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
        for b, s in enumerate(seq_lens):
            n = -(-s // self.page_size)
            table[b, :n], ids = ids[:n].int(), ids[n:]
        made = ForwardBatch.build(
            mode, query_lens=query_lens, seq_lens=seq_lens,
            page_table=table.to(self.pool.device),
            page_size=self.page_size, spec=spec,
        )  # fmt: skip
        return made if host else without_host_lengths(made)

    def run(self, mode, query_lens, seq_lens, *, return_lse=False, host=True):
        """Run a pass through all layers; return the outputs."""
        batch = self.batch(mode, query_lens, seq_lens, host=host)
        metadata = self.dispatcher.init_forward_metadata(batch)
        outputs, latent = [], self.pool.kind == "mla"
        for layer in self.layers:
            t = batch.num_tokens
            q, k, v = (
                torch.randn(t, h, d, generator=self.rng).to(self.pool.device, self.dtype)
                for h, d in (
                    (layer.num_q_heads, layer.head_dim),
                    (layer.num_kv_heads, layer.head_dim),
                    (layer.num_kv_heads, layer.v_head_dim),
                )
            )
            outputs.append(
                self.dispatcher.forward(
                    q, k, None if latent else v, layer, batch, metadata, return_lse=return_lse
                )
            )
        return outputs
