"""Find what a compiled kernel writes to shared memory that a product in flight still reads.

Triton lets a buffer's bytes go to another one behind its last use, and the last use of a factor of
an asynchronous product is where the product begins. What is written between there and the wait, or
behind the wait without a barrier of all warps, may be read by the product. `findings` reads a
kernel in Triton's GPU dialect and reports such writes.
"""

import math
import re
import tempfile
from dataclasses import dataclass, field

from triton._C.libtriton import ir, nvidia, passes

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


@dataclass
class Walk:
    """The state of a walk through the operations of one partition of a kernel, in their order."""

    buffers: dict[str, tuple[str, int, int]]
    reads: list[list[Read]] = field(default_factory=list)
    found: set[str] = field(default_factory=set)

    def write(self, line, buffer, first, end):
        for read in (r for group in self.reads for r in group):
            overlaps = first < read.end and read.first < end
            if overlaps and buffer != read.buffer and not read.synced:
                self.found.add(f"{line.strip()[:120]}\n  is read by {read.line.strip()[:120]}")

    def step(self, line):
        """Follow one operation."""
        names = NAME.findall(line.split(" : ")[0])
        place = re.search(r"allocation\.offset = (\d+)", line)
        if "local_alloc" in line:
            first = int(place[1])
            self.buffers[names[0]] = (names[0], first, first + size_of(line.split("->")[1]))
            return
        if place:  # scratch of the operation, and a barrier between its stores and its loads
            first = int(place[1])
            self.write(line, None, first, first + size_of(line.split(" : ")[-1]))
            self.barrier()
        elif any(f"ttg.{name}" in line for name in ALIASES):
            self.buffers[names[0]] = part_of(self.buffers[names[1]], line)
        elif "local_store" in line or "async_copy_global_to_local" in line:
            self.write(line, *self.buffers[next(x for x in reversed(names) if x in self.buffers)])
        elif "async_tma_copy_global_to_local" in line:
            self.write(line, *self.buffers[next(x for x in names if x in self.buffers)])
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
    """Return the line that closes the region which a line opens."""
    depth = 0
    for i in range(start, len(lines)):
        depth += lines[i].count("{") - lines[i].count("}")
        if depth <= 0 and i > start:
            return i
    raise ValueError(f"no end of {lines[start]}")


def walk(lines, state):
    """Walk through operations; a loop's body twice, so that its end meets its beginning."""
    i = 0
    while i < len(lines):
        line = lines[i]
        if "scf.for" in line or "scf.while" in line:
            end = end_of(lines, i)
            for _ in range(2):
                walk(lines[i + 1 : end], state)
            i = end
        else:
            if line.strip():
                state.step(line)
            i += 1


def findings(ttgir):
    """Return a text for each write that a product in flight may read."""
    if "isAsync = true" not in ttgir:
        return []
    lines = allocated(ttgir).splitlines()
    state, result, i, main = Walk({}), set(), 0, []
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
            part = Walk(inside)
            walk(lines[i + 1 : end], part)
            result |= part.found
            i = end
        else:
            main.append(lines[i])
        i += 1
    walk(main, state)
    return sorted(result | state.found)
