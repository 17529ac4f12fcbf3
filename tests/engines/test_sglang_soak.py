"""What the soak knows of SGLang's logprobs of prompts."""

from types import SimpleNamespace

from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)

from benchmarks.engines.soak_requests import named


def test_sglang_names_the_last_token_0():
    processor = SchedulerLogprobResultProcessor(
        server_args=SimpleNamespace(enable_mis=False), model_config=SimpleNamespace(vocab_size=64)
    )
    request = SimpleNamespace(
        is_prefill_only=False,
        multi_item_delimiter_indices=None,
        origin_input_ids=[3, 63, 62, 0],
        logprob_start_len=0,
        logprob=SimpleNamespace(),
    )
    processor._process_input_token_logprobs(request, [-1.0] * 4)
    assert request.logprob.input_token_logprobs_idx == named([3, 63, 62, 0], 64) == [3, 0, 62, 0]
    assert request.logprob.input_token_logprobs_val == [None, -1.0, -1.0, -1.0]
