"""A dispatcher over a recorded softmax backend and torch_native's linear layers."""

import dataclasses

from attn_core import (
    HybridDispatcher,
    KVPool,
    LinearRoutes,
)
from attn_core.backends.torch_native.linear import TorchNativeLinear
from linear_passes import (
    GDN,
    config,
    make_pool,
)
from recording import LAYERS, recorder

DRAFTS = 3


class Recording(TorchNativeLinear):
    """torch_native that names its passes, and with plans that replays refill."""

    def __init__(self, settings):
        super().__init__(settings)
        self.modes, self.batches = [], []

    def init_forward_metadata(self, batch):
        self.modes.append((batch.forward_mode, batch.batch_size))
        self.batches.append(batch)
        return super().init_forward_metadata(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata[:] = self.init_forward_metadata(batch)


def caches():
    return KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp32")


def linear(*, pool=None, layer=GDN, check_values=False, backend=Recording, verify=True, **row):
    """Return LinearRoutes over one backend for prefill and verify, and one for decode."""
    settings = config(layer, num_draft_tokens=DRAFTS)
    settings = dataclasses.replace(settings, row=dataclasses.replace(settings.row, **row))
    first, second = backend(settings), backend(dataclasses.replace(settings, name="decoder"))
    routes = {"linear_prefill": first, "linear_decode": second}
    if verify:
        routes["linear_verify"] = first
    pool = make_pool(layer, num_drafts=DRAFTS) if pool is None else pool
    return LinearRoutes(routes, pool, check_values=check_values)


def serving(**changes):
    routes = linear(**changes)
    roles = dict.fromkeys(("prefill", "decode", "verify", "draft"), recorder("softmax"))
    return HybridDispatcher(roles, caches(), routes), routes


def forward(dispatcher, batch, tensors, layer=GDN, **changes):
    metadata = dispatcher.init_forward_metadata(batch)
    return dispatcher.forward_linear(*tensors, layer, batch, metadata, **changes), metadata
