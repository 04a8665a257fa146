"""Times FSDP2's all-gathers and the step with and without low-precision shards, and the step of
CPUOffloadPolicy. See README.md.

python benchmarks/fsdp.py --out out/bench-fsdp
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Case, Group, find, target_line
from ranks import on_ranks, run_ranks, sample
from shapes import GPT2, QUICK_SETS, SETS, Shapes
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchopt_ext import FusedAdamW
from torchopt_ext.fsdp import keep_low_precision_shards

CAST, KEPT = "FSDP2 casts", "low-precision shards"
OURS, TORCH = "torchopt_ext", "torch fused"
OFFLOADED = "CPUOffloadPolicy"
COPY_IN, STEP, BOTH, GATHER = "copy in", "clip+step", "2 copy in, clip+step", "all-gather"
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


class Sharded:
    """A sharded model with parameters of these shapes, one module per layer, and its optimizer."""

    def __init__(self, kind: str, shapes: Shapes) -> None:
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = [shapes[i : i + IN_BLOCK] for i in range(0, len(shapes), IN_BLOCK)]
        self.model = nn.Sequential(*[nn.ParameterList(map(torch.randn, some)) for some in layers])
        for module in self.model:
            fully_shard(module, mp_policy=policy)
            module.set_custom_all_gather(ALL_GATHER)
        fully_shard(self.model)
        if kind == KEPT:
            keep_low_precision_shards(self.model)
        params = list(self.model.parameters())
        for param in params:
            param.grad = 0.1 * param.detach()
        self.elements = sum(param._local_tensor.numel() for param in params)
        self.optimizer = FusedAdamW(params, lr=1e-4, max_grad_norm=1.0)

    def begin(self) -> None:
        """Runs a rank's work before the exchange, and the exchange."""
        for module in self.model:
            assert isinstance(module, FSDPModule)
            module.unshard(async_op=True)

    def end(self) -> None:
        """Unpacks the gathered parameters, and frees them."""
        for module in self.model:
            assert isinstance(module, FSDPModule)
            module.unshard()
            module.reshard()

    def copy_in(self) -> float:
        """Returns the milliseconds of :meth:`begin` without the exchange."""
        ALL_GATHER.exchanges = False
        spent = sample(self.begin)
        self.end()
        ALL_GATHER.exchanges = True
        return spent

    def step(self) -> float:
        return sample(self.optimizer.step)

    def both(self) -> float:
        """Returns the time with an exchange in forward and one in backward."""
        return 2 * self.copy_in() + self.step()

    def gather(self) -> float:
        return sample(lambda: (self.begin(), self.end()))

    def copied(self) -> float:
        """Returns the bytes copied per element of a shard."""
        with CopiedBytes() as copied:
            self.begin()
        self.end()
        return copied.count / self.elements


def offloaded_step(kind: str, shapes: Shapes) -> Callable[[], object]:
    """Returns clipping and a step over shards that CPUOffloadPolicy keeps on the CPU."""
    torch.manual_seed(0)
    layers = [shapes[i : i + IN_BLOCK] for i in range(0, len(shapes), IN_BLOCK)]
    model = nn.Sequential(*[nn.ParameterList(map(torch.randn, some)) for some in layers])
    for module in (*model, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    params = list(model.parameters())
    for param in params:
        param.grad = 0.1 * param.detach()
    if kind == OURS:
        return FusedAdamW(params, lr=1e-4, max_grad_norm=1.0).step
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def clip_and_step() -> None:
        clip_grad_norm_(params, 1.0)
        optimizer.step()

    return clip_and_step


def on_rank(rounds: int, quick: bool) -> dict[str, Any]:
    """Times both kinds on a rank, and counts the bytes that each moves."""
    dist.init_process_group("gloo")
    shapes = (QUICK_SETS if quick else SETS)[GPT2]
    kinds = {kind: Sharded(kind, shapes) for kind in (CAST, KEPT)}
    cases = []
    for kind, of in kinds.items():
        calls = {COPY_IN: of.copy_in, STEP: of.step, BOTH: of.both, GATHER: of.gather}
        cases += [Case(kind, operation, call) for operation, call in calls.items()]
    group = Group(f"{GPT2}, {on_ranks(dist.get_world_size())}", shapes, cases, baseline=CAST)

    def offloaded() -> Group:
        steps = [
            Case(kind, STEP, partial(sample, offloaded_step(kind, shapes)))
            for kind in (OURS, TORCH)
        ]
        return Group(f"{group.name}, {OFFLOADED}", shapes, steps, baseline=TORCH)

    rows, _ = harness.measure([lambda: group, offloaded], rounds, lambda call: call())
    # The norm reads 4, the update moves 28, and the 16-bit copy is only written.
    moved = {kind: [of.copied(), 4 + 28 + 2 * (kind == KEPT)] for kind, of in kinds.items()}
    return {"rows": rows, "bytes": moved}


def main() -> None:
    parser = harness.parser(__doc__, "bench-fsdp", rounds=31)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    about = harness.start(options)
    result = run_ranks(on_rank, options.ranks, options.rounds, options.quick)
    lines = [(kind, *map("{:.2f}".format, moved)) for kind, moved in result["bytes"].items()]
    sections: dict[str, str | list[str]] = {
        "Bytes that are read and written for an element of a shard, what is sent and received left "
        "out": harness.table(("implementation", "all-gather", "step"), lines)
    }
    if not options.quick:
        name = f"{GPT2}, {on_ranks(options.ranks)}, {OFFLOADED}"
        row = find(result["rows"], name, STEP, OURS)
        times = row and row["times_as_fast_as"][TORCH]
        sections["Targets"] = [target_line(f"{name}: times as fast", times, 1.4)]
    harness.write(options.out / "fsdp", about, result["rows"], sections, bytes=result["bytes"])


if __name__ == "__main__":
    main()
