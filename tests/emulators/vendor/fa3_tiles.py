"""How FlashAttention-3 cuts a pass into tiles, and what a schedule of them says."""

import torch


def sees(max_q, max_k, d, paged, causal, left, right):
    """Return causal, left and right as the kernel understands them: -1 is no limit."""
    left = -1 if left >= max_k - 1 else left
    right = -1 if right >= max_q - 1 else right
    if max_q == 1 and left == right == -1 and (d <= 64 or d > 128 or not paged):
        causal = False
    right = 0 if causal else right
    return left < 0 and right == 0, left, right


def tile(d, dv, causal, local):
    if d <= 64:
        return (64, 64) if dv == 512 else (192, 128 if causal or local else 192)
    if d <= 96:
        return 192, 128 if local else 144
    if d <= 128:
        return 128, 128 if causal or local else 176
    if d <= 192:
        return 128, 96 if local else (128 if dv <= 128 else 112)
    return 128, 64 if local else 80


def schedule(lengths, queries, causal, local, key):
    """Return metadata of the kernel's size that says which batch it was made for."""
    rounded = -(-len(lengths) // 4) * 4
    vectors = 2 + (not local) + (causal or local)
    made = torch.zeros(rounded * vectors + 1, dtype=torch.int32)
    made[: len(lengths)] = torch.as_tensor(lengths)
    made[rounded : rounded + len(queries)] = torch.as_tensor(queries)
    if rounded:
        made[2 * rounded] = hash(key) % (1 << 31)
    return made


def without_keys(queries, keys, group, tile_m, right):
    """Say which rows, bool [queries, 1, group], lie in a tile that has no block of keys.

    store_zero of hopper/epilogue_fwd.hpp: zeros and -inf, whatever the sink. A row that sees no key
    in a tile that has some gets its sink. Tiles take the queries of a group one after the other.
    """
    last = ((torch.arange(queries * group) // tile_m + 1) * tile_m + group - 1) // group
    ends = last + keys - queries + right if right >= 0 else torch.full_like(last, keys)
    return (ends.clamp(max=keys) <= 0).view(queries, 1, group)
