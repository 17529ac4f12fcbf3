"""Run Gluon kernels on a CPU: each group of warps is a thread.

`load(name)` executes the sources of kernels over torch tensors instead of Triton's. Layouts mean
nothing here, a product is done where it begins, and a thread does what 128 do, so that no race
within a group is found. Barriers in shared memory count as on a device: what waits for ever raises
TimeoutError. Memory that nothing has written is NaN.
"""

import itertools
import math
import pathlib
import random
import re
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import torch

PATIENCE_S = 20.0
ROOT = pathlib.Path(__file__).parents[2] / "packages/attn-core/src"
LINEAR = "attn_core.backends.triton.linear"
SPARSE = "attn_core.backends.triton.sparse"
HOPPER = "attn_core.backends.triton.hopper"
program = threading.local()
turn = threading.Condition()
primary_done = threading.Event()  # of the kernel that a programmatic dependent launch waits for
primary_done.set()


class Pointer:
    """The address of an element of a tensor, or a tensor of them."""

    def __init__(self, tensor, offset=0):
        self.flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def to(self, _):
        return self.offset

    def __getitem__(self, at):
        return self.elsewhere(self.offset[at])

    def __add__(self, other):
        return self.elsewhere(self.offset + other)

    def elsewhere(self, offset):
        result = Pointer.__new__(Pointer)
        result.flat, result.offset, result.dtype = self.flat, offset, self.dtype
        return result


def gl_load(ptr, mask=None, other=0.0, volatile=False, cache_modifier=""):
    offset = torch.as_tensor(ptr.offset)
    if mask is None:
        assert (offset >= 0).all(), "a read before a tensor"
        return ptr.flat[offset.long()]
    mask = torch.as_tensor(mask)
    offset, mask = torch.broadcast_tensors(offset, mask)
    assert (offset[mask] >= 0).all(), "a read before a tensor"
    result = torch.full(offset.shape, float(other)).to(ptr.flat.dtype)
    result[mask] = ptr.flat[offset[mask].long()]
    return result


def gl_store(ptr, x, mask=None):
    offset, x = torch.as_tensor(ptr.offset), torch.as_tensor(x)
    offset, x = torch.broadcast_tensors(offset, x)
    if mask is not None:
        mask = torch.as_tensor(mask).expand(offset.shape)
        offset, x = offset[mask], x[mask]
    ptr.flat[offset.long()] = x.to(ptr.flat.dtype)


def gl_atomic_add(ptr, x, sem=None):
    before = gl_load(ptr).clone()
    gl_store(ptr, before + x)
    return before


def gl_atomic_xchg(ptr, x, mask=None, sem=None, scope=None):
    """Store; nobody reads what was there."""
    _pause()
    gl_store(ptr, x, mask)


def where(condition, a, b):
    if not isinstance(a, Pointer):
        return torch.where(torch.as_tensor(condition), a, b)
    both = Pointer(torch.cat((a.flat, b.flat)))  # to be read alone
    return both + torch.where(condition, a.offset, b.offset + len(a.flat))


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, x):
        self.x, self.dtype, self.shape, self.layout = x, x.dtype, list(x.shape), None

    def index(self, i):
        assert 0 <= i < len(self.x)
        return Shared(self.x[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def _reinterpret(self, dtype, shape, _):
        if list(shape[1:]) == [64, 64] and self.shape[1:] == [64, 128]:
            return Panels(self.x)
        return Shared(self.x.view(dtype).view(shape))

    def load(self, _):
        return self.x.clone()

    def store(self, x):
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        self.x.copy_(x)

    def _keep_alive(self):
        pass


class Written:
    """What TMA writes rows of: a tensor whose last dims are a row."""

    def __init__(self, x):
        self.rows = x.flatten(1)


class Panels:
    """Tiles [64, 128] as swizzled memory holds them: 64 columns, and then the others."""

    def __init__(self, x):
        self.x = x

    def index(self, i):
        return Shared(self.x[int(i) // 2].narrow(1, 64 * (int(i) % 2), 64))


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count):
        self.all = [SimpleNamespace(count=None) for _ in range(count)]

    def index(self, i):
        return self.all[int(i)]


def init(bar, count):
    bar.count = bar.pending = count
    bar.phase = bar.bytes = 0


def _settle(bar):
    assert bar.pending >= 0
    if bar.pending == 0 and bar.bytes == 0:
        bar.phase, bar.pending = bar.phase + 1, bar.count
        turn.notify_all()


def _pause():
    if random.random() < 0.1:
        time.sleep(random.random() * 2e-3)


def arrive(bar, count=1):
    _pause()
    with turn:
        bar.pending -= count
        _settle(bar)


def expect(bar, count):
    with turn:
        bar.bytes += count
        bar.pending -= 1
        _settle(bar)


def wait(bar, phase):
    _pause()
    with turn:
        if not turn.wait_for(lambda: bar.phase % 2 != int(phase), PATIENCE_S):
            raise TimeoutError("a barrier is never complete")


def wait_for_primary():
    if not primary_done.wait(PATIENCE_S):
        raise TimeoutError("the kernel before this one is never complete")


def copy_rows(rows, at, bar, tile):
    first, column = (int(x) for x in at)
    count, width = tile.shape
    tile.x.zero_()
    inside = rows[first : first + count, column : column + width]
    tile.x[: len(inside)] = inside
    with turn:
        bar.bytes -= tile.x.nbytes
        _settle(bar)


def copy_back(to, at, tile):
    rows = to.rows
    first, column = (int(x) for x in at)
    count, width = tile.shape
    assert first + count <= len(rows)
    rows[first : first + count, column : column + width] = tile.x


def copy_elements(tile, ptr, mask=None):
    tile.x.copy_(gl_load(ptr, mask).expand(tile.x.shape))


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(shape[0])
    return Shared(torch.full(shape, math.nan).to(dtype))


def values_of(x):
    return x.x if isinstance(x, Shared) else x


def product(a, b, acc, use_acc=True, is_async=False):
    a, b = values_of(a), values_of(b)
    assert a.dtype == b.dtype
    result = a.float() @ b.float()
    return result + acc if use_acc else result


def wait_products(count, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def own(x):
    """Return arguments with numbers of their own: `+=` changes a tensor in its place.

    What TMA reads, the rows of a matrix, stays where it is.
    """
    if isinstance(x, torch.Tensor):
        return x if x.dim() > 1 else x.clone()
    if isinstance(x, tuple):
        return type(x)(*map(own, x)) if hasattr(x, "_fields") else tuple(map(own, x))
    return x


def unknown_assembly(assembly, constraints, args, **_):
    """Return the first argument: few instructions that are written out change it.

    Each program is on a processor of its own number.
    """
    if "mul.f32" in assembly:
        return args[0] * args[1]
    if "%smid" in assembly:
        return torch.tensor(program.id[0])
    if "ld.acquire" in assembly:
        time.sleep(1e-3)
        complete, announced = primary_done.is_set(), gl_load(args[0])
        if complete and not announced:
            raise TimeoutError("what is waited for is never announced")
        return announced
    return args[0] if args else None


def specialize(functions, *_):
    failures, here = [], (program.id, program.count)

    def run(function, args):
        program.id, program.count = here
        try:
            function(*own(args))
        except Exception as raised:
            failures.append(raised)

    threads = [threading.Thread(target=run, args=x) for x in functions]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    if failures:
        raise failures[0]


def jit(function=None, **_):
    return jit if function is None else function


def layouts(**more):
    return type("Layout", (), {"__init__": lambda self, *a, **k: None, **more})


def _language():
    gl = ModuleType("language")
    plain = layouts()
    shared = layouts(get_default_for=staticmethod(lambda shape, dtype: None))
    gl.__dict__.update(
        constexpr=lambda x: x, float32=torch.float32, float16=torch.float16, int32=torch.int32,
        bfloat16=torch.bfloat16, int64=torch.int64, shared_memory_descriptor=object,
        NVMMADistributedLayout=plain, NVMMASharedLayout=shared, BlockedLayout=plain,
        SliceLayout=plain, DotOperandLayout=plain, SwizzledSharedLayout=plain,
        DistributedLinearLayout=plain, atomic_add=gl_atomic_add, atomic_xchg=gl_atomic_xchg,
        arange=lambda a, b, _=None: torch.arange(a, b),
        full=lambda shape, x, dtype, _=None: torch.as_tensor(x).expand(shape).to(dtype).clone(),
        zeros=lambda shape, dtype, _=None: torch.zeros(shape).to(dtype),
        where=where,
        exp2=torch.exp2, exp=torch.exp, log2=torch.log2, abs=torch.abs, rsqrt=torch.rsqrt,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.fmax(torch.as_tensor(a), torch.as_tensor(b)),  # of a NaN: b
        load=gl_load, store=gl_store, sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis), inline_asm_elementwise=unknown_assembly,
        num_programs=lambda axis: torch.tensor(program.count[axis]), num_warps=lambda: 4,
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        split=lambda x: (x[..., 0], x[..., 1]), join=lambda a, b: torch.stack((a, b), -1),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, _=None, assert_trivial=False: x,
        associative_scan=lambda x, axis, f: x.cumsum(axis),
        static_range=range, program_id=lambda axis: torch.tensor(program.id[axis]),
        allocate_shared_memory=allocate, barrier=lambda: None, warp_specialize=specialize,
    )  # fmt: skip
    return gl


def _zero_rows(tiles, stage, count, first, end):
    """What zero_rows does: its own way depends on a layout."""
    full = tiles.x[int(stage)][:, 64 * first : 64 * end]
    read = full.clone()  # all rows are stored, also those that stay as they are
    _pause()
    full.copy_(torch.where(torch.arange(len(read))[:, None] < int(count), read, 0.0))


def _load_columns(rows, row, tile, stage, full, first, copy, copies):
    """What load_columns does: how it tells the panels of a tile apart depends on a layout."""
    count, width = tile.shape[1] // copies, tile.shape[2]
    part = Shared(tile.x[int(stage)][copy * count : (copy + 1) * count])
    copy_rows(rows, (row, first), full, part)
    assert part.shape == [count, width]


def _zero_tail(tile, stage, start, first_key, seq_len, block, _):
    """What zero_tail does."""
    key = int(start) + torch.arange(block)
    tile.x[int(stage)][(key < int(first_key)) | (key >= int(seq_len))] = 0


def _modules():
    gl = _language()
    mbarrier = SimpleNamespace(
        init=init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=lambda: "barriers"
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=copy_rows,
        async_copy_shared_to_global=copy_back,
        store_wait=lambda _: None,
    )
    hopper = SimpleNamespace(
        warpgroup_mma=product, warpgroup_mma_wait=wait_products, mbarrier=mbarrier, tma=tma,
        fence_async_shared=lambda: None,
    )  # fmt: skip
    async_copy = SimpleNamespace(
        async_copy_global_to_shared=copy_elements,
        commit_group=lambda: None,
        wait_group=lambda _: None,
        mbarrier_arrive=lambda bar, increment_count: arrive(bar, 128),
    )
    ampere = SimpleNamespace(
        mma_v2=lambda a, b, acc: a.float() @ b.float() + acc, async_copy=async_copy
    )
    gluon = SimpleNamespace(jit=jit, constexpr_function=jit, aggregate=lambda x: x, language=gl)
    core = SimpleNamespace(base_value=object, _aggregate=lambda x: x)
    gl.core, gl.math = core, None
    gl.extra = SimpleNamespace(
        cuda=SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=wait_for_primary)
    )
    triton = SimpleNamespace(jit=jit, __version__="3.7.1", language=gl)
    base = "triton.experimental"
    return {
        "triton": triton, "triton.language": gl, base: SimpleNamespace(gluon=gluon),
        f"{base}.gluon": gluon, f"{base}.gluon.language": gl,
        f"{base}.gluon.language.nvidia": SimpleNamespace(hopper=hopper, ampere=ampere),
        f"{base}.gluon.language.nvidia.hopper": hopper,
        f"{base}.gluon.language.nvidia.ampere": ampere,
        "attn_core.backends.triton": SimpleNamespace(schedule=SimpleNamespace(TILE_ROWS=128)),
    }  # fmt: skip


def _loaded(name, modules):
    """Return the module of a source, and of what it imports before it."""
    if name in modules:
        return modules[name]
    path = ROOT / (name.replace(".", "/") + ".py")
    source = re.sub(r"\b\w+\.type\.layout", "None", path.read_text())
    for other in re.findall(r"^from (attn_core\.\S+) import", source, re.MULTILINE):
        _loaded(other, modules)
    module = modules[name] = ModuleType(name)
    kept = {key: sys.modules.get(key) for key in modules}
    sys.modules.update(modules)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        for key, value in kept.items():
            if value is None:
                del sys.modules[key]
            else:
                sys.modules[key] = value
    for own in (_zero_rows, _load_columns, _zero_tail):
        if hasattr(module, own.__name__[1:]):
            setattr(module, own.__name__[1:], own)
    return module


def load(name, of=LINEAR):
    """Return a kernels' module, such as "hopper.fused_gdn", over torch tensors."""
    return _loaded(f"{of}.{name}", _modules())


def launch_overlapped(primary, secondary):
    """Run two launches side by side; gdc_wait of the second waits for the end of the first."""
    failures = []

    def run():
        try:
            primary()
        except Exception as raised:
            failures.append(raised)
        finally:
            primary_done.set()

    primary_done.clear()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        secondary()
    except Exception as raised:
        failures.append(raised)  # what the first launch raised comes before it
    thread.join()
    if failures:
        raise failures[0]


def launch(kernel, programs, *args):
    """Run a kernel's programs one after another. programs: how many there are, on each axis."""
    axes = program.count = programs if isinstance(programs, tuple) else (programs,)
    for program.id in itertools.product(*map(range, axes)):
        kernel(*args)
