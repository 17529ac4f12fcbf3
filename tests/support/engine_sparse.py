"""The indexers of SGLang's models of sparse MLA on a CPU, and a float64 selection to stand beside.

SGLang's own need a GPU: their Hadamard transform, their FP8 products and their top-k.
"""

import torch
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.model_executor.forward_context import get_attn_backend


def stand_ins() -> None:
    """Replace what SGLang has on a GPU alone: capability, Hadamard, and a key of one head."""
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    dsa_indexer.rotate_activation = rotate
    rope = dsa_indexer.get_rope_wrapper

    def of_one_head(*args, **how):
        rotary = rope(*args, **how)

        def embed(positions, q, k):
            pair = rotary(positions, q, k.unsqueeze(1))
            return tuple(x.reshape(y.shape) for x, y in zip(pair, (q, k), strict=True))

        return embed

    dsa_indexer.get_rope_wrapper = of_one_head


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension by its Hadamard matrix, orthogonal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ (matrix * len(matrix) ** -0.5).to(x)


def in_float32(model: torch.nn.Module) -> None:
    """Cast the gates of the heads, which SGLang keeps in bfloat16 beside a float32 model, too."""
    for module in model.modules():
        if isinstance(module, dsa_indexer.Indexer):
            module.weights_proj.float()


def stored(keys: torch.Tensor) -> torch.Tensor:
    """Return index keys as SGLang's pool holds them: FP8, with a float32 scale per key."""
    scale = keys.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448)
    return (keys / scale).to(torch.float8_e4m3fn).double() * scale.double()


def select_densely(self, x, q_lora, positions, forward_batch, layer_id, return_indices=True):
    """Let the dense backend of a pass see the best keys alone; return the number of the layer.

    The model hands it on to the layers that share the selection.
    """
    backend = get_attn_backend()
    q, k, gates = self._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    gates = self._weights_proj_bf16_in_fp32_out(x) if gates is None else gates
    counts = backend.counts(forward_batch)
    parts = zip(
        forward_batch.req_pool_indices.tolist(),
        *(y.double().split(counts) for y in (q, stored(k), gates)),
        strict=True,
    )
    for row, queries, keys, weights in parts:
        before = backend.index_keys.get((layer_id, row), keys[:0])
        keys = backend.index_keys[layer_id, row] = torch.cat([before, keys])
        products = torch.einsum("thd,nd->thn", queries, keys).relu()
        scores = torch.einsum("thn,th->tn", products, weights)
        own = torch.arange(len(keys) - len(queries), len(keys))[:, None]
        seen = torch.arange(len(keys)) <= own
        order = scores.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        best = torch.zeros_like(seen).scatter_(1, order[:, : self.index_topk], value=True)
        backend.chosen[layer_id, row] = best & seen
    return torch.tensor([layer_id])
