"""The layers of a model with latent attention: MLA, or sparse MLA (DSA) with an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attn_core.errors import ModelConfigError
from attn_core.model_config.heads import even_heads
from attn_core.model_config.keys import Keys, brief
from attn_core.spec.requirements import LayerRequirements

_SHARES: Mapping[str, bool] = {"full": False, "shared": True}
_LETTERS: Mapping[str, str] = {"F": "full", "S": "shared"}


def latent_layers(keys: Keys, tp: int) -> tuple[LayerRequirements, ...]:
    """Return the distinct layers of a model with a latent, none where its keys name no latent.

    Raises ModelConfigError for a missing or malformed key, and heads that do not divide by `tp`.
    """
    if keys.get("kv_lora_rank") is None or keys.get("use_mla") is False:
        return ()
    keys.seen.update(("head_dim", "v_head_dim", "num_key_value_heads"))  # before absorption
    heads, latent, rope = keys.need("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    mla = LayerRequirements(
        kind="mla",
        head_dim=latent + rope,
        v_head_dim=latent,
        num_q_heads=even_heads(keys, heads, tp, "query heads"),
        num_kv_heads=1,  # the latent is every rank's
    )
    topk = keys.count("index_topk")
    if topk is None:
        return (mla,)
    dsa = replace(
        mla,
        kind="dsa",
        index_topk=topk,
        index_heads=keys.count("index_n_heads"),  # every rank has all of them
        index_dim=keys.count("index_head_dim"),
    )
    if not any(_sharing(keys)):
        return (dsa,)
    return dsa, replace(dsa, index_heads=None, index_dim=None, shares_topk=True)


def _sharing(keys: Keys) -> list[bool]:
    """Say of each layer whether it shares the selection of the layer before it.

    A list or a text of "F" and "S" goes before a schedule: from layer index_skip_topk_offset - 1
    on, every index_topk_freq-th layer has an indexer; the layers before it all have one.
    Source: SGLang's and transformers' code of GLM-5, which agree.
    """
    depth = keys.count("num_hidden_layers")
    listed = keys.get("indexer_types")
    if listed is None:
        listed = keys.get("index_topk_pattern")
    if listed is not None:
        names = list(listed) if isinstance(listed, list | str) else [listed]
        kinds = [_LETTERS.get(str(name), str(name)) for name in names]
        if not all(kind in _SHARES for kind in kinds):
            raise ModelConfigError(
                f"the config of {keys.owner} has indexers of layers {brief(listed)} (expected "
                'a list of "full" and "shared", or a text of F and S)'
            )
        shares = [_SHARES[kind] for kind in kinds][:depth]
    else:
        freq, offset = keys.count("index_topk_freq") or 1, keys.get("index_skip_topk_offset")
        start = offset if isinstance(offset, int) else 2
        shares = [max(i - start + 1, 0) % freq != 0 for i in range(depth or freq + 1)]
    if shares and shares[0]:
        raise ModelConfigError(
            f"the config of {keys.owner} lets its first layer share a selection, and there is no "
            "layer before it"
        )
    return shares
