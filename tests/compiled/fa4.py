"""Compile the kernels that fa4's rows use, through the backend, for a GPU that is not here.

Usage: python fa4.py sm90|sm100 [WORD …] prints one JSON line per kernel whose name holds a WORD,
all of them by default. Needs flash-attn-4, nvidia-cutlass-dsl, quack-kernels, triton and a C
compiler; torch may be the CPU's: tensors are fake, and so is the driver (fake_libcuda.c).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager

HERE = pathlib.Path(__file__).parent
CHIPS = {"sm90": ("sm_90", "sm_90a", "90"), "sm100": ("sm_100", "sm_100a", "100")}


@contextmanager
def fake_driver():
    """Build the driver that has no device; a process finds it by LD_LIBRARY_PATH at its start."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-w", "-o", library, str(HERE / "fake_libcuda.c")]
        subprocess.run(command, check=True)
        yield folder


def again(arch, words):
    """Run this script in a process that compiles for `arch`."""
    kernels, target, capability = CHIPS[arch]
    with fake_driver() as folder:
        env = os.environ | {
            "FLASH_ATTENTION_ARCH": kernels,
            "CUTE_DSL_ARCH": target,
            "FAKE_CC": capability,
            "LD_LIBRARY_PATH": folder,
            "ATTN_COMPILING": arch,
        }
        done = subprocess.run([sys.executable, __file__, arch, *words], env=env)
    sys.exit(done.returncode)


def main(arch, words):
    import torch
    from attn_core.backend import BackendConfig
    from attn_core.forward import AttentionLayer, CacheView, ForwardBatch, ForwardMode
    from attn_core.kv_cache import LayerCache
    from attn_core.refusals import refuse_layer
    from attn_nvidia import rows_mha, rows_mla
    from attn_nvidia.fa4 import FA4
    from torch._subclasses.fake_tensor import FakeTensorMode

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def ints(*shape):
        return empty(*shape, dtype=torch.int32)

    def row_for(layer, kind, ragged):
        rows = [r for r in (*rows_mha.fa4(), *rows_mla.fa4()) if arch in r.archs and r.kind == kind]
        reasons = []
        for row in rows:
            if not ragged and not row.page_sizes:
                continue  # a vision tower's
            config = BackendConfig(
                name="fa4",
                row=row,
                layers=(layer,),
                page_size=max(row.page_sizes, default=1),
                dtype="bf16",
                kv_cache_dtype="bf16",
                device=torch.device("cuda"),
                arch=arch,
            )
            try:
                refuse_layer(config, layer)
            except Exception as error:
                reasons.append(str(error))
                continue
            return config
        raise LookupError(f"no row declares it: {reasons}")

    def layer_of(d, dv, heads=(8, 2), *, sinks=False, **more):
        return AttentionLayer(
            layer_id=0,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=d,
            v_head_dim=dv,
            scale=d**-0.5,
            sinks=empty(heads[0], dtype=torch.float32) if sinks else None,
            **more,
        )

    def paged(layer, *, kind="mha", lse=True, queries=3):
        config = row_for(layer, kind, ragged=False)
        backend = FA4(config)
        table, lengths = ints(2, 4), ints(2)
        tokens, size = 2 * queries, config.page_size
        view = CacheView(
            page_table=table,
            seq_lens=lengths,
            out_cache_loc=empty(tokens, dtype=torch.int64),
            max_seq_len=4 * size,
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            cu_seqlens_q=ints(3),
            positions=empty(tokens, dtype=torch.int64),
            max_q_len=queries,
            views={layer.view: view},
        )
        heads = layer.num_kv_heads
        k = empty(8, size, heads, layer.head_dim)
        v = None if kind == "mla" else empty(8, size, heads, layer.v_head_dim)
        q = empty(tokens, layer.num_q_heads, layer.head_dim)
        out = empty(tokens, layer.num_q_heads, layer.v_head_dim)
        metadata = backend.init_forward_metadata(batch)
        cache = LayerCache(k=k, v=v)
        backend.forward_extend(
            q, None, None, layer, cache, batch, metadata, out=out, return_lse=lse
        )

    def ragged(layer, *, kind="mha", causal=True):
        backend = FA4(row_for(layer, kind, ragged=True))
        q = empty(6, layer.num_q_heads, layer.head_dim)
        k, v = (empty(9, layer.num_kv_heads, d) for d in (layer.head_dim, layer.v_head_dim))
        backend.forward_ragged(
            q, k, v, layer, ints(3), ints(3), 3, 5, causal=causal, return_lse=True
        )

    kernels = {
        "paged-128": lambda: paged(layer_of(128, 128)),
        "paged-128-without-lse": lambda: paged(layer_of(128, 128), lse=False, queries=1),
        "paged-64-window-sinks": lambda: paged(layer_of(64, 64, sliding_window=9, sinks=True)),
        "paged-80-softcap": lambda: paged(layer_of(80, 80, logit_cap=3.0)),
        "paged-96-window": lambda: paged(layer_of(96, 96, sliding_window=9)),
        "paged-192-128": lambda: paged(layer_of(192, 128)),
        "paged-cross": lambda: paged(layer_of(128, 128, view="cross", is_cross=True)),
        "paged-128-group-7": lambda: paged(layer_of(128, 128, (14, 2))),
        "paged-64-group-5": lambda: paged(layer_of(64, 64, (10, 2))),
        "paged-mha": lambda: paged(layer_of(128, 128, (4, 4))),
        "ragged-vision-80": lambda: ragged(layer_of(80, 80, (3, 3), is_causal=False), causal=False),
        "ragged-128": lambda: ragged(layer_of(128, 128)),
        **{
            f"paged-{d}-every": lambda d=d: paged(layer_of(d, d, sliding_window=9))
            for d in range(16, 129, 16)
        },
    }
    for d in (72, 256) if arch == "sm90" else (72,):
        kernels[f"ragged-vision-{d}"] = lambda d=d: ragged(
            layer_of(d, d, (3, 3), is_causal=False), causal=False
        )
    if arch == "sm100":
        latent = {"kind": "mla"}
        kernels["mla-absorbed"] = lambda: paged(layer_of(576, 512, (16, 1)), **latent)
        kernels["mla-absorbed-128-heads"] = lambda: paged(layer_of(576, 512, (128, 1)), **latent)
        kernels["mla-ragged"] = lambda: ragged(layer_of(192, 128, (4, 4)), **latent)
    for name, build in kernels.items():
        if words and not any(w in name for w in words):
            continue
        start, line = time.time(), {"kernel": name, "arch": arch}
        try:
            with FakeTensorMode():
                build()
        except Exception as error:  # whatever a compiler says is the finding
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line | {"seconds": round(time.time() - start, 1)}), flush=True)


if __name__ == "__main__":
    arch, *words = sys.argv[1:]
    if os.environ.get("ATTN_COMPILING") != arch:
        again(arch, words)
    warnings.simplefilter("ignore")
    main(arch, words)
