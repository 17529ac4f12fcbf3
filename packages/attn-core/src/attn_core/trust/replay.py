"""Run a reproducer on backends and say which of them is wrong, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.errors import AttnError
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device
from attn_core.trust.judge import Answer, Verdict, judge
from attn_core.trust.reproducer import Reproducer
from attn_core.trust.rerun import bench_for, rerun


@dataclass(frozen=True)
class Replayed:
    """What became of a backend: its verdict where it was run, and of what the file holds of it.

    refused: why it was not run here.
    """

    name: str
    now: Verdict | None = None
    recorded: Verdict | None = None
    refused: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it is wrong here; where it was not run, whether it was when it was recorded."""
        verdict = self.recorded if self.now is None else self.now
        return verdict is not None and verdict.wrong


def replay(
    r: Reproducer, names: Sequence[str], registry: Registry, device: Device
) -> list[Replayed]:
    """Run a call on the named backends, by default those that it was recorded with.

    Raises what keeps a named backend from running; of a recorded one it is its `refused`.
    """
    answers: dict[tuple[str, bool], Answer] = {}
    refused: dict[str, str] = {}
    for name in dict.fromkeys([*names] or r.recorded):
        try:
            answers[name, True] = rerun(r, bench_for(r, name, registry, device))
        except AttnError as error:
            if names:
                raise
            refused[name] = str(error)
    for name, (out, lse) in r.recorded.items():
        answer = answers.get((name, True))
        answers[name, False] = Answer(out, lse, None if answer is None else answer.rounds)
    ordered = {f"{'now' if now else 'then'} {name}": a for (name, now), a in answers.items()}
    verdicts = judge(r, ordered)
    all_names = dict.fromkeys([*names, *r.recorded])
    return [
        Replayed(
            name,
            now=verdicts.get(f"now {name}"),
            recorded=verdicts.get(f"then {name}"),
            refused=refused.get(name, ""),
        )
        for name in all_names
    ]


def described(r: Reproducer) -> str:
    """Say in a sentence what a call is."""
    layer, s = r.layer, r.setting
    dims = "/".join(map(str, dict.fromkeys((layer.head_dim, layer.v_head_dim))))
    features = {
        "sliding_window": layer.sliding_window,
        "logit_cap": layer.logit_cap,
        "sinks": layer.sinks is not None,
        "cross": layer.is_cross,
        "not causal": not layer.is_causal,
        "tree": r.spec is not None and r.spec.tree_mask is not None,
    }
    texts = [n if v is True else f"{n} {v:g}" for n, v in features.items() if v]
    tokens = f"{sum(r.query_lens)} queries over {', '.join(map(str, r.seq_lens[:8]))}"
    ellipsis = " …" if len(r.seq_lens) > 8 else ""
    return (
        f"{r.mode.value}, layer {layer.layer_id}: {len(r.seq_lens)} requests, "
        f"{tokens}{ellipsis} tokens; "
        f"{s.kind}, {layer.num_q_heads} heads over {layer.num_kv_heads}, head_dim {dims}, "
        f"{s.dtype}, cache {s.kv_cache_dtype}, page_size {r.cache.page_size}"
        f"{''.join(f', {x}' for x in texts)}"
    )
