"""Prints what NCCL's RAS answers about this job, and the end of torch's flight record of NCCL."""

import os

import torch
import torch.distributed as dist

from ddplaunch.features.hangs import node_evidence

torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
tensor = torch.ones(1 << 20, device="cuda")
for _ in range(3):
    dist.all_reduce(tensor)
dist.all_reduce(tensor, group=dist.new_group([0]))
torch.cuda.synchronize()
status, missing = node_evidence.ask_ras(os.environ[node_evidence.RAS_VARIABLE], 4.0)
print("RAS:", missing or status)
c10d = torch._C._distributed_c10d
dump = getattr(c10d, "_dump_nccl_trace_json", None) or c10d._dump_fr_trace_json
record = dump(True, False)
print("record:", record if isinstance(record, str) else record.decode())
dist.destroy_process_group()
