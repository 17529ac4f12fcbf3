"""Random passes of backends on this GPU beside an oracle of their own, eager and in CUDA graphs.

python tests/device/corners.py SECONDS FIRST_SEED WORKERS BACKEND:KIND [BACKEND:KIND …], KIND one of
mha, mla, dsa. It prints what is wrong, with the seed that shows it again, and counts the passes.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import sys
import time
import traceback
from typing import Any, NamedTuple

import torch
from attn_core import (
    AttentionLayer,
    AttnError,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    NoBackendError,
    Overrides,
    Requirements,
    SpecInfo,
    Speculation,
    load_plugins,
    probe_device,
    select,
    write_index,
    write_kv,
)
from corner_oracle import wrong
from torch import Tensor

MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST, PASSES, INDEX_DIM = 1500, 12, 128


class Model(NamedTuple):
    layer: AttentionLayer
    kind: str
    dtype: str
    store: str
    page: int
    drafts: int
    trees: bool
    index_heads: int


class Pass(NamedTuple):
    """A pass and what the model gives it: q, k, v, and of an indexer q, k and weights."""

    batch: ForwardBatch
    query_lens: list[int]
    seq_lens: list[int]
    slots: list[Tensor]
    inputs: tuple[Tensor, ...]


def draw_model(r: random.Random, kind: str) -> Model:
    dtype = r.choice(["bf16", "bf16", "fp16"]) if kind == "mha" else "bf16"
    heads, group = r.choice([1, 2, 8]), r.choice([1, 2, 4, 7, 8, 16])
    dim = v_dim = r.choice([64, 128, 128, 256])
    page, store = r.choice([1, 16, 64, 128]), r.choice([dtype, dtype, "fp8_e4m3"])
    window, sinks, topk = None, None, None
    if kind == "mha":
        window = r.choice([None, None, 1, 33, 129])
        if r.random() < 0.4:
            sinks = torch.randn(heads * group, device=DEVICE) * r.choice([1, 5, 60])
            sinks = sinks.bfloat16().float()  # all that some kernels take
    else:
        heads, dim, v_dim, group = 1, 576, 512, r.choice([16, 64, 128])
        page = 64 if kind == "dsa" else page
        store = store if kind == "dsa" else dtype
        topk = r.choice([64, 512, 2048]) if kind == "dsa" else None
    layer = AttentionLayer(
        layer_id=3,
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        scale=dim**-0.5,
        sliding_window=window,
        sinks=sinks,
        index_topk=topk,
    )
    trees = kind == "mha" and r.random() < 0.5
    return Model(layer, kind, dtype, store, page, r.choice([1, 2, 4]), trees, r.choice([32, 64]))


class World:
    """A model's pool and dispatcher, and its graphs of decode and verification."""

    def __init__(self, r: random.Random, model: Model, backend: str) -> None:
        registry, x = load_plugins(), model.layer
        needs = LayerRequirements.of(x, model.kind)
        drafts = Speculation(
            topk=2 if model.trees else 1, num_draft_tokens=model.drafts, mode="decode"
        )
        selection = select(
            Requirements(
                layers=(needs,),
                dtype=model.dtype,
                kv_cache_dtype=model.store,
                page_size=model.page,
                speculation=drafts,
            ),
            probe_device(),
            registry,
            registry.installed_libraries(),
            Overrides(attention_backend=backend),
        )
        self.r, self.model, self.x, self.device = r, model, x, DEVICE
        self.pages = 6 * -(-LONGEST // model.page) + 2
        index = {"index_dim": INDEX_DIM} if model.kind == "dsa" else {}
        if index and r.random() < 0.5:
            index["index_dtype"] = "fp8_e4m3"
        self.pool = KVPool(
            [x],
            num_pages=self.pages,
            page_size=model.page,
            kv_cache_dtype=model.store,
            kind=model.kind,
            layout=selection.layout,
            device=DEVICE,
            **index,
        )
        self.cache = self.pool.layer(3)
        rows = [c.row for c in selection.roles.values()]
        self.lse = all(row.lse for row in rows)
        self.rounded = any(row.quantizes_q_to_fp8 for row in rows) and model.store[:3] == "fp8"
        self.poison = 0x30 if any(row.requires_finite_padding for row in rows) else 0xFF
        self.dispatcher = HybridDispatcher.from_selection(
            selection, registry, [x], self.pool, max_bs=5, max_num_tokens=8192, max_seq_len=LONGEST
        )
        self.runner: GraphRunner | None = None

    def step(self, batch: ForwardBatch, plan: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layer: its output, its LSE and its selection, as far as it has them."""
        q, k, *more = inputs
        v, chosen = (more[0] if self.model.kind == "mha" else None), None
        if self.model.kind == "dsa":
            chosen = self.dispatcher.index_topk(*more[:3], self.x, batch, plan)
        actual = self.dispatcher.forward(
            q, k, v, self.x, batch, plan, topk_indices=chosen, return_lse=self.lse
        )
        outputs = actual if isinstance(actual, tuple) else (actual,)
        if self.model.kind == "dsa":  # without a selection it attends to all keys
            return (*outputs, q.new_empty(0) if chosen is None else chosen)
        return outputs

    def capture(self, example: tuple[Tensor, ...]) -> None:
        self.runner = GraphRunner(self.dispatcher, batch_sizes=[1, 3, 5], max_seq_len=LONGEST)
        self.runner.capture(ForwardMode.DECODE, self.step, inputs=example, query_len=1)
        if not self.model.trees:
            verify = ForwardMode.TARGET_VERIFY
            self.runner.capture(verify, self.step, inputs=example, query_len=self.model.drafts)

    def draw(self) -> Pass:
        r, x, page, n = self.r, self.x, self.model.page, self.model.drafts
        mode, b = r.choice(MODES), r.choice([1, 2, 3, 5])
        sizes = [1, 2, page, page + 1, r.randint(1, 400), LONGEST]
        lens = [min(r.choice(sizes), LONGEST) for _ in range(b)]
        if mode is ForwardMode.DECODE:
            news = [1] * b
        elif mode is ForwardMode.TARGET_VERIFY:
            news, lens = [n] * b, [max(n, s) for s in lens]
        else:
            news = [r.choice([0, 1, r.randint(0, s), min(s, 130)]) for s in lens]
        if self.model.kind == "dsa":  # whose selections are judged one by one
            news = [min(count, 20) for count in news]
        ids = r.sample(range(1, self.pages), sum(-(-s // page) for s in lens))
        table = torch.zeros(b, max(-(-s // page) for s in lens) + r.choice([0, 2]), dtype=torch.int)
        for row, s in zip(table, lens, strict=True):
            for column in range(-(-s // page)):
                row[column] = ids.pop()
        for part, _ in self.cache.parts():
            part.view(torch.uint8).fill_(self.poison)
        dtype, loud = DTYPES[self.model.dtype], r.choice([1, 1, 1, 20])

        def new(tokens: int, *dims: int) -> Tensor:
            return torch.randn(tokens, *dims, device=DEVICE).to(dtype)

        k, v = new(sum(lens), x.num_kv_heads, x.head_dim) * loud, None
        if self.model.kind == "mha":
            v = new(sum(lens), x.num_kv_heads, x.v_head_dim)
        index = new(sum(lens), INDEX_DIM)
        own = torch.zeros(sum(lens), dtype=torch.bool)
        slots, at = [], 0
        for row, s, fresh in zip(table, lens, news, strict=True):
            place = torch.arange(s)
            slots.append((row[place // page].long() * page + place % page).to(DEVICE))
            own[at + s - fresh : at + s] = True
            at += s
        old, own, every = (~own).to(DEVICE), own.to(DEVICE), torch.cat(slots)
        write_kv(self.cache, k[old], None if v is None else v[old], every[old])
        inputs = [new(sum(news), x.num_q_heads, x.head_dim) * loud, k[own]]
        if v is not None:
            inputs.append(v[own])
        if self.model.kind == "dsa":
            write_index(self.cache, index[old], every[old])
            heads = self.model.index_heads
            weights = torch.randn(sum(news), heads, device=DEVICE)
            inputs += [new(sum(news), heads, INDEX_DIM), index[own], weights]
        batch = ForwardBatch.build(
            mode, query_lens=news, seq_lens=lens, page_table=table.to(DEVICE), page_size=page,
            spec=self.drafts(b) if mode is ForwardMode.TARGET_VERIFY else None,
        )  # fmt: skip
        return Pass(batch, news, lens, slots, tuple(inputs))

    def drafts(self, b: int) -> SpecInfo:
        n = self.model.drafts
        if not self.model.trees:
            return SpecInfo(topk=1, num_draft_tokens=n)
        tree = torch.eye(n, dtype=torch.bool).repeat(b, 1, 1)
        for one in tree:
            for draft in range(1, n):
                one[draft] |= one[self.r.randrange(draft)]
        return SpecInfo(topk=2, num_draft_tokens=n, tree_mask=tree.to(DEVICE))


def run(seed: int, asked: str, until: float, said: Any) -> int:
    """Run the passes of one seed; return how many there were."""
    backend, kind = asked.split(":")
    r, done = random.Random(seed), 0
    torch.manual_seed(seed)
    model = draw_model(r, kind)
    try:
        world = World(r, model, backend)
    except NoBackendError:
        return 0
    for at in range(PASSES):
        if time.time() > until:
            break
        p = world.draw()
        plan = world.dispatcher.init_forward_metadata(p.batch)
        why = wrong(world, p, world.step(p.batch, plan, *p.inputs))
        if at == 3 and world.dispatcher.captured:
            world.capture(p.inputs)
        if not why and world.runner is not None and world.runner.fits(p.batch):
            why = wrong(world, p, world.runner.replay(p.batch, *p.inputs))
            why = f" in a graph:{why}" if why else ""
            done += 1
        done += 1
        if why:
            said.put(
                f"WRONG {asked} seed {seed} pass {at} {p.batch.forward_mode.value} {model}{why}"
            )
    return done


def work(number: int, workers: int, first: int, until: float, asked: list[str], said: Any) -> None:
    mine, passes, seeds = asked[number % len(asked)], 0, 0
    for seed in range(first + number, 1 << 40, workers):
        if time.time() > until:
            break
        try:
            count = run(seed, mine, until, said)
            passes, seeds = passes + count, seeds + (count > 0)
        except AttnError as error:
            said.put(f"REFUSED {mine} seed {seed} {type(error).__name__}: {str(error)[:300]}")
        except Exception as error:
            trace = traceback.format_exc().strip().splitlines()[-4:]
            said.put(f"FAILED {mine} seed {seed} {str(error)[:200]} {trace}")
            if "CUDA" in str(error):
                break
    said.put(f"worker {number} {mine}: {passes} passes of {seeds} models")


def main() -> None:
    seconds, first, workers, requested = float(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4:]
    context, until = multiprocessing.get_context("spawn"), time.time() + seconds
    said: Any = context.Queue()
    common = (workers, first, until, requested, said)
    processes = [context.Process(target=work, args=(i, *common)) for i in range(workers)]
    for process in processes:
        process.start()
    while time.time() < until + 10 and (any(p.is_alive() for p in processes) or not said.empty()):
        try:
            print(said.get(timeout=0.3), flush=True)
        except queue.Empty:
            continue
    for number, process in enumerate(processes):
        if process.is_alive():
            print(f"worker {number} is still compiling")
            process.kill()


if __name__ == "__main__":
    main()
