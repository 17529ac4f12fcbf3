"""Trial: launch parameters of sparse MLA's kernels."""
import dataclasses, itertools, torch, time
from benchmarks.sparse_cases import *
from benchmarks.sparse import check
from benchmarks.peers.sparse import CONTESTANTS
from benchmarks.timing import CudaTimer
from attn_core.backends.triton.sparse import launch
torch.set_grad_enabled(False)
dev=torch.device("cuda"); timer=CudaTimer(dev)
own={(c.part,c.store):c for c in CONTESTANTS if c.name=="triton"}
def t(x,part,store="bf16",label=""):
    c=own[part,store]
    try:
        rec={}
        call=c.prepare(x,c.load()); check(rec,x,c,call)
        us=timer.measure_graph(call).us
        print(x.case.name,part,store,label,round(us,1),rec,flush=True)
    except Exception as e: print(x.case.name,part,label,repr(e)[:300],flush=True)
orig=launch.Scoring.of
def scoring(bn,w,bt,st,mr):
    def of(*a,**k):
        s=orig(*a,**k); c=s.constants
        o={"num_warps":w,"num_stages":st}
        if mr: o["maxnreg"]=mr
        return s._replace(constants=c._replace(BN=bn,BT=bt),options=o)
    return of
for case in (CASES[0], CASES[3], CASES[1], CASES[2]):
    x=build(case,dev)
    for row,w in ((8192,8),(16384,16),(16384,32),(32768,32)):
        for wr in (2048,4096):
            launch.ROW,launch.ROW_WARPS,launch.WRITTEN=row,w,wr
            t(x,"select",label=(row,w,wr))
    launch.ROW,launch.ROW_WARPS,launch.WRITTEN=16384,16,2048
    combos=((256,8,64,3,128),(256,8,32,3,128),(128,4,64,3,128),(128,4,64,2,None),(128,8,64,3,None),(256,8,128,2,128),(256,8,64,4,128)) if case.phase=="prefill" else ((128,4,1,4,128),(128,4,1,3,None),(128,8,1,4,None),(64,4,1,5,None),(256,8,1,3,128))
    for cmb in combos:
        launch.Scoring.of=scoring(*cmb)
        for span in ((1024,) if case.phase=="prefill" else (512,1024,4096)):
            launch.SPAN=span
            t(x,"score",label=(cmb,span))
    launch.Scoring.of=orig; launch.SPAN=1024
    del x; torch.cuda.empty_cache()
