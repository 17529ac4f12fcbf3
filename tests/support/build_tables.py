"""Compile the kernels that fill SGLang's tables, for a GPU that is not here; prints their names.

A process of its own, since a kernel that was decorated for the interpreter cannot be compiled.
"""

import triton
from attn_core.integrations.sglang import page_tables, tree_tables
from build_kernels import StandIn, target_of
from triton.compiler import ASTSource
from triton.runtime import driver

TABLE = {"req_to_token": "*i32", "rows": "*i64", "seq_lens": "*i64", "slot_map": "*i64"}
TABLE |= {"page_table": "*i32", "lengths": "*i32"}
SLOTS = {"slots": "*i64", "positions": "*i64"}
KERNELS = {
    "page table": (
        page_tables._kernel,
        {**TABLE, "starts": "*i64"},
        {"PAGE_SIZE": 16, "MAPPED": True, "STARTED": False, "BLOCK": 256},
    ),
    "branches": (
        page_tables._branch_kernel,
        {**TABLE, **SLOTS},
        {"TOPK": 4, "STEPS": 2, "PAGE_SIZE": 16, "MAPPED": True, "BLOCK": 256},
    ),
    "trees": (
        tree_tables._kernel,
        {**TABLE, **SLOTS},
        {"TOPK": 4, "STEPS": 3, "DRAFTS": 16, "MAPPED": True, "BLOCK": 256},
    ),
}

driver.set_active(StandIn(target_of("sm90")))
for name, (kernel, pointers, constants) in KERNELS.items():
    function = kernel()
    types = {
        x: pointers.get(x, "constexpr" if x in constants else "i32") for x in function.arg_names
    }
    source = ASTSource(
        function, types, {(function.arg_names.index(x),): y for x, y in constants.items()}
    )
    triton.compile(source, target=target_of("sm90"))
    print(name, flush=True)
