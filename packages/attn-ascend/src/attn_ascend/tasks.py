"""Calls in ACL graphs whose lengths are numbers on the host: tasks, which each replay updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attn_ascend.library import operator

WORKSPACE: Final = "_npu_fused_infer_attention_score_v2_get_max_workspace"
OUTPUT: Final = "_npu_fused_infer_attention_score_v2_infer_output"
_OF_OUTPUT: Final = (
    *("query", "value", "input_layout", "block_table", "num_query_heads", "num_key_value_heads"),
    "return_softmax_lse",
)


@dataclass(frozen=True, eq=False)
class Task:
    """A captured call: what updates it, and its tensors, which keep their memory as long as it.

    event: the graph waits for it in front of the call, so that no replay runs before its update.
    """

    handle: Any
    event: Any
    operands: Mapping[str, Any]


def capturing() -> bool:
    """Say whether the current stream captures; on a CPU, where nothing does, no."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_current_stream_capturing())


def captured(
    attend: Any, operands: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]
) -> tuple[Task, tuple[Tensor, Tensor]]:
    """Call the fused operator as a task of the graph; return it, and the output and its LSE."""
    npu = torch.npu  # type: ignore[attr-defined]  # torch-npu brings it
    stream, event = npu.current_stream(), npu.ExternalEvent()
    event.wait(stream)
    event.reset(stream)
    workspace = operator(WORKSPACE, operands)(**operands, **lengths)
    outputs = {name: x for name, x in operands.items() if name in _OF_OUTPUT}
    out = operator(OUTPUT, outputs)(**outputs)
    operands = {**operands, "workspace": workspace, "out": list(out)}
    npu.graph_task_group_begin(stream)
    attend.out(**operands, **lengths)
    return Task(npu.graph_task_group_end(stream), event, operands), tuple(out)


def update(attend: Any, tasks: Sequence[Task], lengths: Mapping[str, Sequence[int]]) -> None:
    """Give the tasks of a graph other lengths, for its next replay.

    It waits for the replay before, whose calls it would change as long as that runs.
    """
    if not tasks:
        return
    npu = torch.npu  # type: ignore[attr-defined]  # torch-npu brings it
    npu.current_stream().synchronize()
    stream = npu.current_stream()
    for task in tasks:
        npu.graph_task_update_begin(stream, task.handle)
        attend.out(**task.operands, **lengths)
        npu.graph_task_update_end(stream)
        task.event.record(stream)
