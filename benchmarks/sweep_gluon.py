"""Trial: Hopper's latent decode that gathers."""
import torch, sys
from benchmarks.sparse_cases import *
from benchmarks.sparse import rms
from benchmarks.timing import CudaTimer
from attn_core.backends.triton.sparse import hopper, launch
torch.set_grad_enabled(False)
dev=torch.device("cuda"); timer=CudaTimer(dev)
small=SparseCase(phase="decode",batch=2,new=1,length=4096)
for case in (small,*CASES):
    x=build(case,dev)
    q=x.q; out=torch.full((case.tokens,128,512),float("nan"),device=dev,dtype=q.dtype); lse=torch.empty(case.tokens,128,device=dev)
    chosen=x.chosen.clone()
    if case is small: chosen[1,1000:]=-1
    for name,call in (("gluon",lambda: hopper.attend(q,x.layer,x.caches["bf16"],chosen,out,lse,processors=132)),("triton",lambda: launch.attend(q,x.layer,x.caches["bf16"],chosen,out,lse,processors=132,arch="sm90"))):
        try:
            out.fill_(float("nan")); call(); torch.cuda.synchronize()
            err=max(rms(out[t],x.attended(t,chosen[t],"bf16")) for t in (0,case.tokens//2,case.tokens-1))
            s=(q[-1].double()@x.caches["bf16"].k.view(-1,576)[chosen[-1][chosen[-1]>=0].long()].double().T*x.layer.scale).logsumexp(-1)
            el=(lse[-1]-s).abs().max().item()
            print(case.name,name,"err",err,"lse",el,flush=True)
            print(case.name,name,round(timer.measure_graph(call).us,1),"us",flush=True)
        except Exception as e: print(case.name,name,repr(e)[:1000],flush=True)
    del x; torch.cuda.empty_cache()
