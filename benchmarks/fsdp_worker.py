"""The ranks of fsdp.py: fsdp_worker.py OUT ROUNDS quick|full"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import sample
from shapes import GPT2, QUICK_SETS, SETS, Shapes
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.timing import in_turn
from torchopt_ext.fsdp import keep_low_precision_shards

CAST, KEPT = "FSDP2 casts", "low-precision shards"
IMPLEMENTATIONS = (CAST, KEPT)
COPY_IN, STEP, BOTH, GATHER = "copy in", "clip+step", "2 copy in, clip+step", "all-gather"
OPERATIONS = (COPY_IN, STEP, BOTH, GATHER)
IN_BLOCK = 12  # tensors of a layer


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copies within a rank read and write before a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._foreach_copy_.default, torch.ops.aten.copy_.default):
            self.count += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self.count += 2 * sum(t.nbytes for t in args[0])
        return func(*args, **(kwargs or {}))


class AllGather:
    """FSDP2's all-gather, with a switch that leaves out the exchange."""

    exchanges = True

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        if self.exchanges:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group)


ALL_GATHER = AllGather()


def sharded(shapes: Shapes) -> nn.Module:
    """Returns a sharded model with parameters of these shapes, one module per layer."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [shapes[i : i + IN_BLOCK] for i in range(0, len(shapes), IN_BLOCK)]
    model = nn.Sequential(*[nn.ParameterList(map(torch.randn, some)) for some in layers])
    for module in model:
        fully_shard(module, mp_policy=policy)
        module.set_custom_all_gather(ALL_GATHER)
    return fully_shard(model)


def begin(model: nn.Module) -> None:
    """Runs a rank's work before the exchange, and the exchange."""
    for module in model:
        assert isinstance(module, FSDPModule)
        module.unshard(async_op=True)


def end(model: nn.Module) -> None:
    """Unpacks the gathered parameters, and frees them."""
    for module in model:
        assert isinstance(module, FSDPModule)
        module.unshard()
        module.reshard()


def times_of(kind: str, shapes: Shapes) -> tuple[Callable[[], dict[str, float]], float]:
    """Returns a call that times everything once, and the bytes copied per element of a shard."""
    model = sharded(shapes)
    if kind == KEPT:
        keep_low_precision_shards(model)
    params = list(model.parameters())
    for param in params:
        param.grad = 0.1 * param.detach()
    optimizer = FusedAdamW(params, lr=1e-4, max_grad_norm=1.0)

    def times() -> dict[str, float]:
        ALL_GATHER.exchanges = False
        copying = sample(lambda: begin(model))
        end(model)
        step = sample(optimizer.step)
        ALL_GATHER.exchanges = True
        gathering = sample(lambda: (begin(model), end(model)))
        return {COPY_IN: copying, STEP: step, BOTH: 2 * copying + step, GATHER: gathering}

    times()  # creates state and buffers
    with CopiedBytes() as copied:
        begin(model)
    end(model)
    return times, copied.count / sum(param._local_tensor.numel() for param in params)


def main() -> None:
    out, rounds, size = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = (QUICK_SETS if size == "quick" else SETS)[GPT2]
    copied: dict[str, list[float]] = {}
    calls = []
    for kind in IMPLEMENTATIONS:
        times, for_gather = times_of(kind, shapes)
        # The norm reads 4, the update moves 28, and the 16-bit copy is only written.
        copied[kind] = [for_gather, 4 + 28 + (2 if kind == KEPT else 0)]
        calls.append((kind, times))
    samples: dict[str, list[float]] = {
        f"{operation}, {kind}": [] for operation in OPERATIONS for kind in IMPLEMENTATIONS
    }
    kinds = [kind for kind, _ in calls]
    for taken in islice(in_turn([times for _, times in calls], lambda times: times()), rounds):
        for kind, times in zip(kinds, taken, strict=True):
            for operation, spent in times.items():
                samples[f"{operation}, {kind}"].append(spent)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"samples": samples, "bytes": copied}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
