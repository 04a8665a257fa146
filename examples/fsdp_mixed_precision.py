"""A 16-bit model under FSDP2 with FSDPadaptOptimizer, whose state is offloaded between steps.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/fsdp_mixed_precision.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_text
from model import Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, load_fsdp_optimizer, offload_fsdp_optimizer
from torchopt_ext.trainer.windows import TokenWindows

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Transformer(dim=64, n_layers=4, n_heads=4, max_seq_len=128, seed=1234).bfloat16()
for layer in model.layers.values():
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
optimizer = FSDPadaptOptimizer(FusedAdamW(model.parameters(), lr=1e-3), clip_grad_norm=1.0)

text = TokenWindows(load_text()[0], seq_len=128)
sampler: DistributedSampler[torch.Tensor] = DistributedSampler(text, seed=1234)
batches = DataLoader(text, batch_size=8, sampler=sampler, collate_fn=text.collate_fn)
for step, (inputs, labels) in zip(range(1, 21), batches, strict=False):
    loss = F.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
    optimizer.backward(loss)  # multiplies by the loss scale, which float16 needs
    load_fsdp_optimizer(optimizer)
    stepped = optimizer.step()  # False: a gradient was not finite on some rank, nothing changed
    offload_fsdp_optimizer(optimizer)  # as in RL, to make room for generating samples
    if dist.get_rank() == 0 and step % 5 == 0:
        norm = optimizer.grad_norm.item()
        print(f"step {step:2}  loss {loss.item():.4f}  norm {norm:.3f}  stepped {stepped}")
dist.barrier()
dist.destroy_process_group()
