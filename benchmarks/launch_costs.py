"""Say what a layer's call is made of on this host: `python -m benchmarks.launch_costs`.

New tensors in several ways, and of each kernel of a sparse layer the launch by our launcher and by
Triton's C function alone, whose time is mostly the driver's. Microseconds, medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from attn_core.ops.forms import same_form
from attn_core.ops.triton import launcher
from attn_core.ops.triton.launcher import Launcher

from benchmarks import layer_calls


def median_us(call: Callable[[], object], count: int = 400) -> float:
    """Time a call that queues work; the device is waited for every 40 calls."""
    times = []
    for i in range(count + 20):
        if i % 40 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return sorted(times[20:])[count // 2] / 1e3


def show(name: str, call: Callable[[], object]) -> None:
    """Print the time of a call."""
    print(f"{name:<60} {median_us(call):6.2f}", flush=True)


def tensors(device: torch.device) -> None:
    """Time what makes tensors, and what compares them."""
    of: dict[str, Any] = {"dtype": torch.int32, "device": device}
    x = torch.empty(16, 2048, **of)
    q = torch.empty(16, 128, 576, dtype=torch.bfloat16, device=device)
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda")  # noqa: B009  # not in stubs
    fits = same_form(q, x)
    show("nothing", lambda: None)
    show("python: sum of 1000 numbers", lambda: sum(range(1000)))
    show("torch.empty", lambda: torch.empty(16, 2048, **of))
    show("empty_like", lambda: torch.empty_like(x))
    show("new_empty", lambda: q.new_empty(16, 128, 512))
    show("_empty_strided_cuda", lambda: quick((16, 2048), (2048, 1), torch.int32))
    show("torch.empty of 8, unbound", lambda: torch.empty(8, 16, 2048, **of).unbind(0))
    show("torch.empty of few bytes", lambda: torch.empty(16, **of))
    show("same_form of two", lambda: fits(q, x))
    show("data_ptr", q.data_ptr)


def launches(device: torch.device) -> None:
    """Time the launches of sparse decode one by one."""
    launch = Launcher.launch
    for name, call in layer_calls.sparse_calls(layer_calls.SPARSE[0], device):
        if ": plan" in name:
            continue
        for _ in range(3):
            call()
        result: list[tuple[Launcher, tuple[Any, ...]]] = []

        def record(self: Launcher, *args: Any, into: list[Any] = result) -> None:
            into.append((self, args))
            launch(self, *args)

        with mock.patch.object(Launcher, "launch", record):
            call()
        show(name, call)
        for self, args in result:
            kernel = getattr(self._kernel, "fn", self._kernel).__name__
            show(f"    {kernel}", partial(launch, self, *args))
            direct = self._direct
            if direct is None:
                continue
            first = launcher._encoded(args[1], direct.maps) if direct.maps else args[1]
            stream = direct.stream(direct.device())
            every = (*args[0], stream, *direct.head, *first, *direct.last)
            run = partial(direct.run, *every)
            show(f"    {kernel}: the C function, {len(every)} arguments", run)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    tensors(torch.device("cuda"))
    launches(torch.device("cuda"))
