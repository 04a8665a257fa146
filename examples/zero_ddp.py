"""Plain DDP with ZeroRedundancyOptimizer, in your own loop. docs/zero.md explains both lines.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/zero_ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_text
from model import Transformer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from torchopt_ext import FusedAdamW
from torchopt_ext.trainer.windows import TokenWindows
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

dist.init_process_group("gloo")
model = Transformer(dim=64, n_layers=4, n_heads=4, max_seq_len=128)
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
zero = ZeroRedundancyOptimizer(
    model.parameters(), FusedAdamW, partition="balanced", lr=1e-3, max_grad_norm=1.0
)
ddp.register_comm_hook(None, reduce_scatter_hook(zero))  # gradients go to their owners only

text = TokenWindows(load_text()[0], seq_len=128)
sampler: DistributedSampler[torch.Tensor] = DistributedSampler(text, seed=1234)
batches = DataLoader(text, batch_size=8, sampler=sampler, collate_fn=text.collate_fn)
for step, (inputs, labels) in zip(range(1, 21), batches, strict=False):
    zero.zero_grad()
    loss = F.cross_entropy(ddp(inputs["input"]).flatten(0, 1), labels.flatten())
    loss.backward()
    zero.step()  # one norm over all ranks' parts; then each rank sends its parameters to all
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")

held = [v for state in zero.optim.state.values() for v in state.values()]
share = sum(v.numel() for v in held) / 2 / sum(p.numel() for p in model.parameters())
print(f"rank {dist.get_rank()} holds {share:.1%} of the optimizer's state", flush=True)
dist.barrier()
dist.destroy_process_group()
