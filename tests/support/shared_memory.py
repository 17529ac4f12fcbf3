"""Find what a compiled kernel overwrites in shared memory while it is still read.

Triton lets a buffer's bytes go to another one behind its last use, and the last use of a factor of
an asynchronous product is where the product begins. What is written between there and the wait, or
behind the wait without a barrier of all warps, may be read by the product.

A thread's load from a buffer that TMA fills may still be queued when its warp arrives at a barrier,
and what waits there may let TMA fill the buffer anew. A fence between the two waits for the load;
so does a store or a product of what was loaded.

`findings` reads a kernel in Triton's GPU dialect and reports such writes, and such arrivals.
"""

import math
import re
import tempfile
from dataclasses import dataclass, field

from triton._C.libtriton import ir, nvidia, passes

REGIONS = ("scf.for", "scf.while", "scf.if")
NEEDS = ("local_store", "tt.store", "warp_group_dot ")  # their values are there when they begin
ALIASES = ("memdesc_index", "memdesc_subslice", "memdesc_trans", "memdesc_reinterpret")
TYPE = re.compile(r"<((?:\d+x)+)(!?[\w.]+)")
NAME = re.compile(r"%[\w-]+(?:#\d+)?")


def allocated(ttgir):
    """Return a kernel's text behind the pass that places everything in shared memory."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    passed = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(passed)
    passes.ttgpuir.add_allocate_warp_groups(passed)
    passes.gluon.add_inliner(passed)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passed, 90, 86)
    passed.run(module, "shared_memory")
    return re.sub(r" loc\(.*?\)$", "", str(module), flags=re.MULTILINE)


def size_of(text):
    """Return the bytes of the first tensor or buffer type of a text, 0 where there is none."""
    result = TYPE.search(text)
    if result is None:
        return 0
    bits = re.search(r"\d+", result[2])  # of "bf16", "i1" or "f8E4M3FN"; pointers have none
    width = max(int(bits[0]) // 8, 1) if bits else 8
    return math.prod(int(n) for n in result[1].split("x") if n) * width


def part_of(buffer, line):
    """Return what an operation takes of a buffer: all of it where the index is computed."""
    index = re.search(r"memdesc_index %[\w-]+\[%c(\d+)_i32", line)
    if index is None:
        return buffer
    name, first, _ = buffer
    size = size_of(line.split("->")[1])
    return name, first + int(index[1]) * size, first + (int(index[1]) + 1) * size


@dataclass
class Read:
    """A factor that a product in flight reads. synced: all warps have waited for the product."""

    line: str
    buffer: str
    first: int
    end: int
    waited: bool = False
    synced: bool = False


@dataclass(frozen=True)
class Load:
    """A load of threads from a buffer."""

    line: str
    buffer: str


@dataclass
class Walk:
    """The state of a walk through the operations of one partition of a kernel, in their order.

    filled: the buffers that TMA fills. made_of: the loads that a value was computed from. queued:
    loads that nothing has waited for. arrivals: each with a load that is queued there.
    """

    buffers: dict[str, tuple[str, int, int]]
    reads: list[list[Read]] = field(default_factory=list)
    found: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    made_of: dict[str, set[Load]] = field(default_factory=dict)
    queued: set[Load] = field(default_factory=set)
    arrivals: set[tuple[str, Load]] = field(default_factory=set)

    def write(self, line, buffer, first, end):
        for read in (r for group in self.reads for r in group):
            overlaps = first < read.end and read.first < end
            if overlaps and buffer != read.buffer and not read.synced:
                self.found.add(f"{line.strip()[:120]}\n  is read by {read.line.strip()[:120]}")

    def follow(self, line, names):
        """Follow what is computed from loads, up to what waits for them."""
        sources = set().union(*(self.made_of.get(x.split("#")[0], ()) for x in names))
        if "local_load" in line and names[1] in self.buffers:
            sources = {Load(line, self.buffers[names[1]][0])}
            self.queued = self.queued | sources
        elif "fence_async_shared" in line:
            self.queued = set()
        elif "allocation.offset" in line or any(x in line for x in NEEDS):
            self.queued = self.queued - sources
        elif "arrive_barrier" in line:
            self.arrivals |= {(line, load) for load in self.queued}
            self.queued = set()  # one finding a load is enough
        if line.lstrip().startswith("%"):
            self.made_of |= dict.fromkeys(NAME.findall(line.split(" = ")[0]), sources)

    def step(self, line):
        """Follow one operation."""
        names = NAME.findall(line.split(" : ")[0])
        place = re.search(r"allocation\.offset = (\d+)", line)
        if "local_alloc" in line:
            first = int(place[1])
            self.buffers[names[0]] = (names[0], first, first + size_of(line.split("->")[1]))
            return
        self.follow(line, names)
        if place:  # scratch of the operation, and a barrier between its stores and its loads
            first = int(place[1])
            self.write(line, None, first, first + size_of(line.split(" : ")[-1]))
            self.barrier()
        elif any(f"ttg.{name}" in line for name in ALIASES):
            self.buffers[names[0]] = part_of(self.buffers[names[1]], line)
        elif "local_store" in line or "async_copy_global_to_local" in line:
            self.write(line, *self.buffers[next(x for x in reversed(names) if x in self.buffers)])
        elif "async_tma_copy_global_to_local" in line:
            buffer = self.buffers[next(x for x in names if x in self.buffers)]
            self.filled.add(buffer[0])
            self.write(line, *buffer)
        elif "warp_group_dot_wait" in line:
            pending = int(re.search(r"pendings = (\d+)", line)[1])
            for group in self.reads[: len(self.reads) - pending]:
                for read in group:
                    read.waited = True
        elif "warp_group_dot " in line:
            factors = [x for x in names[1:3] if x in self.buffers]
            self.reads.append([Read(line, *self.buffers[x]) for x in factors])
            if "isAsync = true" not in line:
                self.reads.pop()
        elif "gpu.barrier" in line or "ttg.barrier" in line or "arrive_barrier" in line:
            self.barrier()

    def barrier(self):
        for group in self.reads:
            for read in group:
                read.synced |= read.waited
        self.reads = [group for group in self.reads if not all(r.synced for r in group)]


def end_of(lines, start):
    """Return the line that closes the region which a line opens; behind the last where none does.

    That is a region around the partitions, which are walked apart.
    """
    depth = 0
    for i in range(start, len(lines)):
        depth += lines[i].count("{") - lines[i].count("}")
        if depth <= 0 and i > start:
            return i
    return len(lines)


def walk(lines, state):
    """Walk through operations; a loop's body twice, so that its end meets its beginning.

    What is in a region may not run: no load has been waited for there.
    """
    i = 0
    while i < len(lines):
        line = lines[i]
        if any(x in line for x in REGIONS):
            end, before = end_of(lines, i), state.queued
            for _ in range(1 if "scf.if" in line else 2):
                walk(lines[i + 1 : end], state)
            state.queued = state.queued | before
            i = end
        else:
            if line.strip():
                state.step(line)
            i += 1


def findings(ttgir):
    """Return a text for each write or arrival behind which something read may be overwritten."""
    if "isAsync = true" not in ttgir and "async_tma_copy_global_to_local" not in ttgir:
        return []
    lines = allocated(ttgir).splitlines()
    state, i, main = Walk({}), 0, []
    walks = [state]
    while i < len(lines):
        captured = re.search(r"ttg\.warp_specialize\((.*?)\)", lines[i])
        partition = re.match(r"\s*(?:default|partition\d+\((.*?)\) num_warps)", lines[i])
        if captured:
            walk(main, state)
            main, names = [], NAME.findall(captured[1])
        elif partition:
            end = end_of(lines, i)
            inside = dict(state.buffers)
            for name, outer in zip(NAME.findall(partition[1] or ""), names, strict=False):
                if outer in state.buffers:
                    inside[name] = state.buffers[outer]
            walks.append(Walk(inside))
            walk(lines[i + 1 : end], walks[-1])
            i = end
        else:
            main.append(lines[i])
        i += 1
    walk(main, state)
    filled = set().union(*(part.filled for part in walks))
    result = set().union(*(part.found for part in walks))
    for line, load in set().union(*(part.arrivals for part in walks)):
        if load.buffer in filled:
            result.add(f"{line.strip()[:120]}\n  may come before {load.line.strip()[:120]}")
    return sorted(result)
