"""A serving loop over attn_core: chunked prefill, shared prefixes, CUDA graphs, draft trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from attn_core import (
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    PageAllocator,
    Registry,
    Requirements,
    Role,
    SpecInfo,
    Speculation,
    copy_slots,
    load_plugins,
    pad_page_table,
    probe_device,
    select,
)
from torch import Tensor

HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 32, 101
NUM_PAGES, MAX_BS, MAX_SEQ_LEN, CHUNK = 64, 4, 256, 16
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)  # 0 → 1 and 0 → 2
DRAFTS, TOPK = len(TREE), 2


class Model:
    """Two layers of attention with random weights; its only access to the cache is `attend`."""

    def __init__(self, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(0)
        width = (HEADS + 2 * KV_HEADS) * DIM

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=rng) / math.sqrt(shape[-1])).to(device)

        self.embedding = weight(VOCAB, HEADS * DIM) * math.sqrt(DIM)
        self.places = weight(MAX_SEQ_LEN, HEADS * DIM) * math.sqrt(DIM)
        self.qkv = [weight(width, HEADS * DIM) for _ in range(2)]
        self.head = weight(VOCAB, HEADS * DIM)
        self.layers = [
            AttentionLayer(
                layer_id=i,
                num_q_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                v_head_dim=DIM,
                scale=DIM**-0.5,
            )
            for i in range(2)
        ]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return logits [T, VOCAB] of tokens and positions, int64 [T] each."""
        x = self.embedding[tokens] + self.places[positions]
        for layer, weight in zip(self.layers, self.qkv, strict=True):
            heads = (x @ weight.T).view(len(x), -1, DIM)
            q, k, v = heads.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
            x = x / 4 + attend(q, k, v, layer).flatten(1)
        return x @ self.head.T


@dataclass(eq=False)
class Request:
    """The tokens of a request; the cache holds the first `cached` of them."""

    name: str
    tokens: list[int]
    cached: int = 0


class Server:
    """One model, one cache, and the requests that it serves."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or load_plugins()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Model(self.device)
        needs = Requirements(
            layers=tuple(dict.fromkeys(map(LayerRequirements.of, self.model.layers))),
            dtype="fp32",
            page_size=8,
            speculation=Speculation(topk=TOPK, num_draft_tokens=DRAFTS),
        )
        installed = registry.installed_libraries()
        self.selection = select(needs, probe_device(), registry, installed)
        assert self.selection.page_size is not None  # it is None without softmax layers
        self.pool = KVPool(
            self.model.layers,
            num_pages=NUM_PAGES,
            page_size=self.selection.page_size,
            kv_cache_dtype=self.selection.kv_cache_dtype,
            layout=self.selection.layout,
            device=self.device,
        )
        self.pages = PageAllocator(NUM_PAGES, self.pool.page_size)
        self.dispatcher = HybridDispatcher.from_selection(
            self.selection,
            registry,
            self.model.layers,
            self.pool,
            max_bs=MAX_BS,
            max_num_tokens=MAX_BS * CHUNK,
            max_seq_len=MAX_SEQ_LEN,
        )
        self.names = (f"request {i}" for i in itertools.count())
        self.graphs = GraphRunner(
            self.dispatcher, batch_sizes=[1, 2, MAX_BS], max_seq_len=MAX_SEQ_LEN
        )
        tokens = torch.zeros(1, dtype=torch.int64)  # an input of each captured step
        roles: dict[ForwardMode, Role] = {
            ForwardMode.DECODE: "decode",
            ForwardMode.TARGET_VERIFY: "verify",
        }
        for mode, role in roles.items():
            if self.dispatcher.backend(role) in self.dispatcher.captured:
                self.graphs.capture(mode, self.step, inputs=[tokens])

    def step(self, batch: ForwardBatch, metadata: object, tokens: Tensor) -> Tensor:
        """Run all layers: what a graph captures, and what an eager pass calls."""

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
            out = self.dispatcher.forward(q, k, v, layer, batch, metadata)
            assert isinstance(out, Tensor)  # a pair with return_lse
            return out

        return self.model(tokens, batch.positions, attend)

    def run(self, mode: ForwardMode, requests: list[Request], new: list[list[int]]) -> Tensor:
        """Run a pass over new tokens of some requests; return the logits of each token."""
        lengths = [r.cached + len(n) for r, n in zip(requests, new, strict=True)]
        for request, length in zip(requests, lengths, strict=True):
            self.pages.grow(request.name, length)
        spec = None
        if mode is ForwardMode.TARGET_VERIFY:
            mask = TREE.expand(len(requests), -1, -1).contiguous().to(self.device)
            spec = SpecInfo(topk=TOPK, num_draft_tokens=DRAFTS, tree_mask=mask)
        batch = ForwardBatch.build(
            mode,
            query_lens=[len(n) for n in new],
            seq_lens=lengths,
            page_table=pad_page_table(
                [self.pages.pages(r.name) for r in requests], device=self.device
            ),
            page_size=self.pool.page_size,
            spec=spec,
        )
        tokens = torch.tensor(list(itertools.chain(*new)), device=self.device)
        if self.graphs.fits(batch):
            logits: Tensor = self.graphs.replay(batch, tokens)
            return logits.clone()
        return self.step(batch, self.dispatcher.init_forward_metadata(batch), tokens)

    def add(self, prompt: list[int], like: Request | None = None) -> Request:
        """Prefill a prompt in chunks, reusing the pages of a prefix that another request shares."""
        request = Request(next(self.names), list(prompt))
        if like is not None:
            pairs = zip(prompt[:-1], like.tokens[: like.cached], strict=False)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            request.cached = self.pages.share(request.name, like.name, len(list(same)))
        while request.cached < len(prompt):
            chunk = prompt[request.cached : request.cached + CHUNK]
            logits = self.run(ForwardMode.EXTEND, [request], [chunk])
            request.cached += len(chunk)
        request.tokens.append(int(logits[-1].argmax()))
        return request

    def decode(self, requests: list[Request]) -> Tensor:
        """Generate one token for each request; return the logits, [B, VOCAB]."""
        logits = self.run(ForwardMode.DECODE, requests, [r.tokens[r.cached :] for r in requests])
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.cached += 1
            request.tokens.append(token)
        return logits

    def verify(self, requests: list[Request], guesses: list[tuple[int, int]]) -> Tensor:
        """Verify two candidates per next token, as branches; return logits [B, DRAFTS, VOCAB]."""
        new = [[r.tokens[-1], *g] for r, g in zip(requests, guesses, strict=True)]
        logits = self.run(ForwardMode.TARGET_VERIFY, requests, new).view(-1, DRAFTS, VOCAB)
        for request, drafts, best in zip(requests, new, logits.argmax(-1).tolist(), strict=True):
            path = [0]  # draft 0 is a token that was sampled before
            if best[0] in drafts[1:]:
                path.append(drafts.index(best[0], 1))
            self.keep(request, path)
            request.tokens += [best[i] for i in path]
        return logits

    def keep(self, request: Request, path: list[int]) -> None:
        """Move the K and V of the accepted drafts to directly behind the prefix."""
        size, pages = self.pool.page_size, self.pages.pages(request.name)

        def slots(tokens: list[int]) -> Tensor:
            at = [request.cached + i for i in tokens]
            slots = [pages[i // size] * size + i % size for i in at]
            return torch.tensor(slots, device=self.device)

        for layer in self.model.layers:
            copy_slots(self.pool.layer(layer.layer_id), slots(path), slots([*range(len(path))]))
        request.cached += len(path)

    def free(self, request: Request) -> None:
        """End a request. Pages that no other request shares can be reused."""
        self.pages.release(request.name)


def main(registry: Registry | None = None) -> None:
    """Serve three requests and print what happened."""
    server = Server(registry)
    print(server.selection.explain().partition("others:")[0].rstrip())
    names = {x.config.name for x in server.dispatcher.captured}
    print("  in graphs ", ", ".join(sorted(names)) or "nothing: steps run eagerly")
    first = server.add([i * 7 % VOCAB for i in range(40)])  # three chunks
    second = server.add([*first.tokens[:30], 5, 6, 7], like=first)  # 24 tokens are shared
    third = server.add([1, 2, 3])
    requests = [first, second, third]
    for _ in range(4):
        server.decode(requests)  # three requests, padded to four in a graph
    server.verify(requests, [(r.tokens[-2], r.tokens[-3]) for r in requests])
    for request in requests:
        print(f"{request.name}: {request.cached} tokens cached, last {request.tokens[-6:]}")
    print(f"{server.pages.num_held} pages held")
    for request in requests:
        server.free(request)
    print(f"{server.pages.num_held} pages held after the last request")


if __name__ == "__main__":
    main()
