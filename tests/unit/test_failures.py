"""A backend that fails in a pass is named, with the pass and a remedy; the next pass works."""

import pytest
import torch
from attn_core.errors import BackendError, BackendRunError, BatchError, UnsupportedError
from attn_core.ops.kv import read_kv
from recording import LAYERS, M, Recorder, batch, make, qkv, recorder

LAUNCH = RuntimeError("CUDA error: too many resources requested for launch")
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CUBIN = ValueError("Missing TRTLLM-GEN kernel (decode): headDim 96")


class Failing(Recorder):
    """Fails in the methods that `faults` names, once each."""

    def __init__(self, config):
        super().__init__(config)
        self.faults = {}

    def _fail(self, name):
        if name in self.faults:
            raise self.faults.pop(name)

    def _record(self, name, *args, **kwargs):
        self._fail(name)
        return super()._record(name, *args, **kwargs)


def failing(mode=None, **faults):
    """Return a dispatcher whose decode backend fails as `faults` say: method → error."""
    decode = Failing(recorder("acme").config)
    decode.faults = faults
    return make(mode, decode=decode)[0], decode


def raised(call):
    with pytest.raises(BackendRunError) as caught:
        call()
    return caught.value


CALLS = {
    "init_forward_metadata": lambda d, b: d.init_forward_metadata(b),
    "forward_decode": lambda d, b: d.forward(*qkv(2), LAYERS[1], b, None),
    "init_cuda_graph_state": lambda d, b: d.init_cuda_graph_state(2, 2),
    "init_forward_metadata_capture_cuda_graph": (
        lambda d, b: d.init_forward_metadata_capture_cuda_graph(b)
    ),
    "init_forward_metadata_replay_cuda_graph": (
        lambda d, b: d.init_forward_metadata_replay_cuda_graph(b, None)
    ),
}
PASS = "a decode pass of batch size 2, 2 tokens"


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("fault", [LAUNCH, CUBIN, AssertionError("head_dim % 8")])
def test_what_a_backend_raises_names_it_and_the_pass(method, fault):
    dispatcher, decode = failing(**{method: fault})
    error = raised(lambda: CALLS[method](dispatcher, batch(M.DECODE)))
    where = {"forward_decode": f", layer 1, {PASS}", "init_cuda_graph_state": ""}
    said = f"{type(fault).__name__}: {fault}"
    shown = "forward" if method == "forward_decode" else method  # the dispatcher's call
    expected = f"acme failed in {shown}{where.get(method, f', {PASS}')}: {said}; `attn doctor`"
    assert str(error).startswith(expected)
    assert "--attention-backend" in str(error)
    assert error.__cause__ is fault
    assert not error.restart
    assert isinstance(error, BackendError)
    CALLS[method](dispatcher, batch(M.DECODE))  # the next pass works
    assert decode.calls[-1][0] == method


def test_an_extend_pass_and_ragged_attention_are_named_too():
    prefill = Failing(recorder("acme").config)
    prefill.faults = {"forward_extend": LAUNCH, "forward_ragged": LAUNCH}
    dispatcher = make(None, prefill=prefill)[0]
    b, cu = batch(M.EXTEND), torch.tensor([0, 2], dtype=torch.int32)
    error = raised(lambda: dispatcher.forward(*qkv(4), LAYERS[0], b, None))
    said = "acme failed in forward, layer 0, a extend pass of batch size 2, 4 tokens: "
    assert str(error).startswith(said.replace("a extend", "an extend"))
    error = raised(lambda: dispatcher.forward_ragged(*qkv(2), LAYERS[0], cu, cu, 2, 2, causal=True))
    assert str(error).startswith("acme failed in forward_ragged, layer 0: RuntimeError: CUDA")


def test_a_failed_pass_is_run_again_over_the_same_cache():
    """The failed pass wrote its own slots; the second writes them again, and reads the same."""
    dispatcher, decode = failing(forward_decode=LAUNCH)
    cache = dispatcher.caches.layer(0)
    before = cache.k.clone()
    b, (q, k, v) = batch(M.DECODE), qkv(2)
    raised(lambda: dispatcher.forward(q, k, v, LAYERS[0], b, None))
    slots = b.views["full"].out_cache_loc
    rest = torch.ones(cache.k.shape[:2], dtype=torch.bool).flatten()
    rest[slots] = False
    assert torch.equal(cache.k.flatten(0, 1)[rest], before.flatten(0, 1)[rest])
    k2, v2 = k + 1, v + 1
    actual = dispatcher.forward(q, k2, v2, LAYERS[0], b, dispatcher.init_forward_metadata(b))
    assert actual is decode.returned
    assert torch.equal(read_kv(cache, slots, torch.float32)[0], k2)
    dispatcher.forward(*qkv(4), LAYERS[0], batch(M.EXTEND), None)


def test_the_contract_is_still_checked_after_a_failure():
    dispatcher, decode = failing(forward_decode=LAUNCH)
    b, (q, k, v) = batch(M.DECODE), qkv(2)
    raised(lambda: dispatcher.forward(q, k, v, LAYERS[0], b, None))
    decode._attend = lambda *_: "no tensor"
    with pytest.raises(BackendError, match="acme returned out as str"):
        dispatcher.forward(q, k, v, LAYERS[0], b, None)


@pytest.mark.parametrize(
    "fault",
    [
        MEMORY,
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
        RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v with size 9"),
    ],
)
def test_out_of_memory_asks_for_less(fault):
    dispatcher, _ = failing(forward_decode=fault)
    error = raised(lambda: CALLS["forward_decode"](dispatcher, batch(M.DECODE)))
    assert "run a smaller batch (max_bs, max_num_tokens)" in str(error)
    assert not error.restart


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "Check failed: (status == cudaSuccess) unspecified launch failure",
        "HIP error: an illegal memory access was encountered",
    ],
)
def test_a_lost_context_asks_for_another_process(text):
    dispatcher, _ = failing(forward_decode=RuntimeError(text))
    error = raised(lambda: CALLS["forward_decode"](dispatcher, batch(M.DECODE)))
    assert error.restart
    assert "restart the process" in str(error)
    assert "the next pass may be run" not in str(error)


@pytest.mark.parametrize("method", CALLS)
def test_errors_of_attn_core_pass_through(method):
    for kind in (UnsupportedError, BatchError):
        mine = kind("as it is")
        dispatcher, _ = failing(**{method: mine})
        with pytest.raises(kind) as caught:
            CALLS[method](dispatcher, batch(M.DECODE))
        assert caught.value is mine


def test_an_interruption_is_no_failure():
    dispatcher, _ = failing(forward_decode=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        CALLS["forward_decode"](dispatcher, batch(M.DECODE))
