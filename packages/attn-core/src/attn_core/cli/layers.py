"""The attention layers read from a model, as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from attn_core.spec.requirements import LayerRequirements, Requirements


def layers_as_data(needs: Requirements) -> list[dict[str, Any]]:
    """Return the distinct layers with one rank's heads; part is "text" or "vision"."""
    return [{"part": part, **asdict(layer)} for part, layer in _parts(needs)]


def layers_as_text(needs: Requirements, model: Path) -> str:
    """Return one line of text for each distinct layer."""
    lines = [f"layers read from {model}"]
    for part, x in _parts(needs):
        names = ("query", "KV") if x.family == "softmax" else ("key", "value")
        counts = (x.num_q_heads, x.num_kv_heads)
        head_counts = {f"{name} heads": n for name, n in zip(names, counts, strict=True)}
        texts = [f"{value} {name}" for name, value in head_counts.items() if value is not None]
        dims = dict.fromkeys((x.head_dim, x.v_head_dim))
        texts.append(f"head_dim {'/'.join(str(dim) for dim in dims)}")
        texts += [f"window {x.sliding_window}"] if x.sliding_window else []
        texts += [f"logit cap {x.logit_cap:g}"] if x.logit_cap else []
        texts += [f"top {x.index_topk} keys"] if x.index_topk else []
        texts += [f"{x.index_heads} index heads of {x.index_dim}"] if x.index_heads else []
        texts += ["selection of the layer before"] if x.shares_topk else []
        texts += [f"dual chunk attention {x.dual_chunk}"] if x.dual_chunk else []
        texts += [name for name in ("sinks", "cross", "encoder") if getattr(x, name)]
        lines.append(f"  {part if part == 'vision' else x.kind:<11}{', '.join(texts)}")
    return "\n".join(lines)


def _parts(needs: Requirements) -> list[tuple[str, LayerRequirements]]:
    vision = [] if needs.vision is None else [("vision", needs.vision)]
    return [*(("text", layer) for layer in needs.layers), *vision]
