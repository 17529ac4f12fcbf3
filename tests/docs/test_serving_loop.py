"""The serving loop of the docs gives what plain attention over each whole request gives."""

import ast
import dataclasses
import importlib.util
import pathlib
import sys

import attn_core
import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "serving_loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = importlib.util.spec_from_file_location("serving_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_loop"] = module  # its dataclass asks for its module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:  # the numbers are compared in float32, on a CPU
        patch.setattr(module, "probe_device", lambda: attn_core.Device("cpu", "avx2"))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield module
    del sys.modules["serving_loop"]


def registry(graphs):
    """Return the built-in plugins; with graphs, a torch_native whose steps are captured."""
    result = attn_core.load_plugins()
    if not graphs:
        return result
    native = result.get("torch_native", "softmax")
    rows = [dataclasses.replace(row, cuda_graph="uniform") for row in native.capabilities]
    able = dataclasses.replace(native, capabilities=rows, create="graphed:Graphed")
    return dataclasses.replace(result, backends={("softmax", "torch_native"): able})


def expected(model, tokens):
    """Return the logits [T, VOCAB] of a sequence, every query over all keys before it."""

    def attend(q, k, v, layer):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        behind = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(behind, -torch.inf).softmax(-1), v)

    return model(torch.tensor(tokens), torch.arange(len(tokens)), attend)


def close(mine, right):
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_each_token_is_that_of_plain_attention(loop, graphs, monkeypatch):
    server = loop.Server(registry(graphs))
    replayed, passes = [], []
    replay, run = server.graphs.replay, server.run
    monkeypatch.setattr(
        server.graphs, "replay", lambda batch, *x: replayed.append(batch) or replay(batch, *x)
    )
    monkeypatch.setattr(server, "run", lambda mode, *x: passes.append(mode) or run(mode, *x))
    first = server.add([i * 7 % loop.VOCAB for i in range(40)])
    assert len(passes) == 3, "it comes in chunks"
    second = server.add([*first.tokens[:30], 5, 6, 7], like=first)
    assert server.pages.pages(first.name)[:3] == server.pages.pages(second.name)[:3]
    assert len(passes) == 4, "24 of its 33 tokens were in the cache"
    requests = [first, second, server.add([1, 2, 3])]
    for request in requests:
        logits = expected(server.model, request.tokens[:-1])
        assert request.tokens[-1] == logits[-1].argmax()

    def decode():
        before = [list(r.tokens) for r in requests]
        logits = server.decode(requests)
        for mine, tokens, request in zip(logits, before, requests, strict=True):
            right = expected(server.model, tokens)[-1]
            close(mine, right)
            assert request.tokens == [*tokens, right.argmax()]

    for _ in range(9):  # over the ends of pages
        decode()
    # the right guess is the second branch, the first one, neither
    guesses, accepted = [], [2, 2, 1]
    for request, at in zip(requests, (1, 0, None), strict=True):
        right = int(expected(server.model, request.tokens)[-1].argmax())
        wrong = [(right + 1) % loop.VOCAB, (right + 2) % loop.VOCAB]
        if at is not None:
            wrong[at] = right
        guesses.append(tuple(wrong))
    before = [list(r.tokens) for r in requests]
    logits = server.verify(requests, guesses)
    for mine, tokens, branches in zip(logits, before, guesses, strict=True):
        close(mine[0], expected(server.model, tokens)[-1])
        for i, guess in enumerate(branches):
            close(mine[1 + i], expected(server.model, [*tokens, guess])[-1])
    assert [len(r.tokens) - len(b) for r, b in zip(requests, before, strict=True)] == accepted
    for _ in range(2):
        decode()  # over what was accepted
    server.free(requests.pop(0))
    decode()  # over the prefix whose first owner is gone, with other padding
    assert [b.batch_size for b in replayed] == ([3] * 12 + [2] if graphs else [])
    for request in requests:
        server.free(request)
    assert server.pages.num_held == 0


def test_it_prints_what_happened(loop, capsys):
    loop.main(registry(True))
    said = capsys.readouterr().out
    assert "in graphs  torch_native" in said
    assert "0 pages held after the last request" in said
    loop.main(registry(False))
    assert "in graphs  nothing: steps run eagerly" in capsys.readouterr().out


def test_it_needs_public_names_only():
    nodes = ast.walk(ast.parse(EXAMPLE.read_text()))
    result = [x for x in nodes if isinstance(x, ast.ImportFrom) and "attn" in x.module]
    assert [x.module for x in result] == ["attn_core"]
    assert {a.name for a in result[0].names} <= set(attn_core.__all__)
