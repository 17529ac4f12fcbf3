"""The random passes for a GPU, on a CPU: they find a planted fault, and nothing without one."""

import pathlib
import queue
import time

import pytest
from attn_core import HybridDispatcher

DEVICE_TESTS = pathlib.Path(__file__).parents[1] / "device"


@pytest.fixture
def corners(monkeypatch):
    monkeypatch.syspath_prepend(str(DEVICE_TESTS))
    import corners

    monkeypatch.setattr(corners, "LONGEST", 90)
    monkeypatch.setattr(corners, "PASSES", 6)
    return corners


def said_of(corners, kind, seeds):
    said = queue.Queue()
    passes = sum(corners.run(s, f"torch_native:{kind}", time.time() + 60, said) for s in seeds)
    assert passes == 6 * len(seeds)
    return [said.get() for _ in range(said.qsize())]


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_nothing_is_wrong(corners, kind):
    assert not said_of(corners, kind, range(3))


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_a_fault_is_found(corners, kind, monkeypatch):
    real = HybridDispatcher.forward

    def faulty(self, q, *args, **options):
        return real(self, q * 1.5, *args, **options)

    monkeypatch.setattr(HybridDispatcher, "forward", faulty)
    assert said_of(corners, kind, range(2))


def test_a_wrong_selection_is_found(corners, monkeypatch):
    real = HybridDispatcher.index_topk

    def faulty(self, *args, **options):
        chosen = real(self, *args, **options)
        return None if chosen is None else chosen.roll(1, 0)

    monkeypatch.setattr(HybridDispatcher, "index_topk", faulty)
    said = said_of(corners, "dsa", range(3))
    assert said
    assert all("selects" in x or "better keys" in x for x in said)
