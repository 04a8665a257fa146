"""Steps, scales, saves and loads without numpy. Argument: a folder to save to."""

# ruff: noqa: E402

import sys

sys.modules["numpy"] = None  # type: ignore[assignment]  # an import raises ImportError

import torch
import torch.distributed as dist
from torch.nn import Parameter

import torchopt_ext
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.mixed_precision import load_checkpoint, save_checkpoint

weight = Parameter(torch.ones(100))
fused = torchopt_ext.FusedAdamW([weight], lr=0.1, max_grad_norm=1.0)
scaler = torchopt_ext.GradScaler("cpu", init_scale=2.0)
scaler.scale(weight.sum()).backward()
scaler.step(fused)
scaler.update()
assert fused.known("grad_norm") == fused.control.grad_norm == 10.0
fused.load_state_dict(fused.state_dict())

half = Parameter(torch.ones(100, dtype=torch.bfloat16))
for base in torch.optim.AdamW, torchopt_ext.FusedAdamW:
    mixed = torchopt_ext.FSDPadaptOptimizer(base([half], lr=0.1))
    mixed.backward(half.sum())
    mixed.step()
    save_checkpoint(mixed, sys.argv[1])
    load_checkpoint(mixed, sys.argv[1])

model = torch.nn.Linear(3, 3)
model(torch.ones(3)).sum().backward()
container = OptimizersContainer([model], torchopt_ext.FusedAdamW, {"lr": 0.1})
container.step()
container.load_state_dict(container.state_dict())

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zero = torchopt_ext.ZeroRedundancyOptimizer(model.parameters(), torchopt_ext.FusedAdamW, lr=0.1)
zero.step()
zero.consolidate_state_dict()
zero.load_state_dict(zero.state_dict())
dist.destroy_process_group()
