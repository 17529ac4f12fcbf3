"""SGLang's own draft worker of EAGLE on a CPU: print its attention's difference from a dense one.

Usage: python engine_drafts.py TOPK. The hooks of the plugin are those that SGLang applies. What a
branch may see comes from SGLang's kernel for its own draft backends.
"""

import itertools
import pathlib
import sys
import tempfile
from types import SimpleNamespace

import torch
from engine_logits import draw_weights, load, make_model

STEPS, HEADS, DIM = 4, 8, 32
ROWS, PREFIX = (2, 1, 3), (17, 40, 5)


def create_worker(topk: int):
    """Return EAGLE's draft worker for a target that attn_core serves."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as draft:
        make_model(pathlib.Path(folder))
        make_model(
            pathlib.Path(draft), architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1
        )
        flags = f"""--attention-backend attn_core --page-size 1 --max-running-requests 8
            --speculative-algorithm EAGLE --speculative-draft-model-path {draft}
            --speculative-num-steps {STEPS} --speculative-eagle-topk {topk}
            --speculative-num-draft-tokens {STEPS + 1 if topk == 1 else 8}"""
        args, ports, target = load(folder, flags)
        from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

        owner = SimpleNamespace(model_runner=target, model_config=target.model_config, device="cpu")
        worker = EagleDraftWorker(args, 0, target.ps, ports.nccl_port, owner)
        worker.alloc_memory_pool(
            memory_pool_config=target.memory_pool_config,
            req_to_token_pool=target.req_to_token_pool,
            token_to_kv_pool_allocator=target.token_to_kv_pool_allocator,
        )
        worker.init_attention_backends()
        worker.init_cuda_graphs()
    return worker


def create_batch(worker, topk: int, generator: torch.Generator):
    """Return SGLang's batch of three requests, their slots drawn, over random keys and values."""
    from sglang.kernels.ops.speculative.cache_locs import assign_draft_cache_locs_contiguous
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    pool, table = worker.draft_runner.token_to_kv_pool, worker.req_to_token_pool.req_to_token
    for x in pool.k_buffer + pool.v_buffer:
        x.normal_(generator=generator)
    rows, prefix = torch.tensor(ROWS), torch.tensor(PREFIX)
    table[1:4, :100] = (torch.randperm(4000, generator=generator)[:300] + 1).view(3, 100)
    size = len(ROWS)
    slots = torch.empty(size * topk * STEPS, dtype=torch.int64)
    assign_draft_cache_locs_contiguous[(size,)](
        rows, table, prefix, slots, table.shape[1], topk, STEPS
    )
    drafted = EagleDraftInput(
        topk_p=torch.rand(size, topk, generator=generator),
        topk_index=torch.randint(0, 1000, (size, topk), generator=generator),
        hidden_states=torch.randn(size, HEADS * DIM, generator=generator),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=None,
        req_pool_indices=rows,
        seq_lens=prefix,
        seq_lens_cpu=None,
        seq_lens_sum=None,
        out_cache_loc=slots,
        positions=prefix.repeat_interleave(topk),
        spec_algorithm=worker.draft_runner.spec_algorithm,
        spec_info=drafted,
        sampling_info=SimpleNamespace(temperatures=torch.ones(size, 1), is_all_greedy=True),
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )


def visible_slots(worker, batch, topk: int) -> list[list[torch.Tensor]]:
    """Return the slots that each step's branches see, as SGLang's own backends are told."""
    from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices

    table, size = worker.req_to_token_pool.req_to_token, batch.batch_size
    slots = torch.zeros(STEPS, size * topk * 128, dtype=torch.int64)
    starts = torch.zeros(STEPS, size * topk + 1, dtype=torch.int32)
    generate_draft_decode_kv_indices[(STEPS, size, topk)](
        batch.req_pool_indices, table, batch.seq_lens, slots, starts, batch.positions,
        table.shape[1], slots.shape[1], starts.shape[1], 4, 4, 16, 1,
    )  # fmt: skip
    return [
        [slots[i, begin:end] for begin, end in itertools.pairwise(at)]
        for i, at in enumerate(starts.tolist())
    ]


def main(topk: str) -> None:
    worker = create_worker(int(topk))
    from engine_passes import dense

    model = worker.draft_runner.model
    generator = draw_weights(model)
    model.model.fc.weight.data.mul_(0.02)  # no norm follows: scores would grow to millions
    batch = create_batch(worker, int(topk), generator)
    visible, pool = visible_slots(worker, batch, int(topk)), worker.draft_runner.token_to_kv_pool
    differences = []

    def checked(step, forward):
        def run(q, k, v, layer, batch, **keywords):
            out = forward(q, k, v, layer, batch, **keywords)
            for row, slots in enumerate(visible[step]):
                seen = torch.ones(1, len(slots), dtype=torch.bool)
                keys, values = pool.k_buffer[0][slots], pool.v_buffer[0][slots]
                query = q[row].view(1, HEADS, DIM)
                expected = dense(query, keys, values, seen, layer.scaling)
                differences.append((out[row].view(1, HEADS, DIM) - expected).abs().max().item())
            return out

        return run

    backend = worker.draft_attn_backend
    for step, part in enumerate(backend.attn_backends):
        part.forward_decode = checked(step, part.forward_decode)
    with torch.no_grad():
        backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()
        worker.draft_forward(batch)
    names = [type(x).__name__ for x in (backend, worker.draft_extend_attn_backend)]
    print(*names, len(differences), max(differences))


if __name__ == "__main__":
    main(*sys.argv[1:])
