"""In which order SGLang's policies admit requests that share prompts, as the docs tell it."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "ABCABC"), ("lpm", "ABCABC"), ("dfs-weight", "AABBCC")]
)
def test_of_prompts_in_turn_only_one_policy_makes_neighbours(policy, order, monkeypatch):
    arguments = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(schedule_policy, "get_server_args", lambda: arguments)
    cache = RadixCache.create_simulated()
    for number in range(3):
        key = RadixKey(token_ids=array("q", [number] * 64), extra_key=None)
        cache.insert(InsertParams(key=key, value=torch.zeros(64, dtype=torch.int64)))
    queue = [
        SimpleNamespace(
            rid=str(i),
            origin_input_ids=array("q", [i % 3] * 64 + [9, i]),
            output_ids=array("q"),
            extra_key=None,
            priority=None,
            _compute_max_prefix_len=lambda n: n - 1,
        )
        for i in range(6)
    ]
    planned = schedule_policy.SchedulePolicy(policy, cache, False, False, False)
    planned.calc_priority(queue)
    assert "".join("ABC"[request.origin_input_ids[0]] for request in queue) == order


def test_a_running_batch_keeps_its_order():
    """Nothing of SGLang permutes it: keeping all rows in another order changes nothing."""
    batch = ScheduleBatch(reqs=["a", "b", "c"])
    batch.filter_batch(keep_indices=[2, 0, 1])
    assert batch.reqs == ["a", "b", "c"]
