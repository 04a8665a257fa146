"""The ranks of zero.py: time torch's ZeroRedundancyOptimizer and ours in turn.

Every sample begins after a barrier and ends when the slowest rank is done.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import sample
from rows import paired
from shapes import SETS, SMALL, Shapes, gpt2, parameters
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

TORCH = "torch"
TORCH_VIEW = "torch, bucket view"
GREEDY, GREEDY_VIEW, BALANCED = "greedy", "greedy, bucket view", "balanced"
LOCAL, STEP, FULL = "clip + step", "clip + step, norm agreed on", "and parameters returned"
Samples = list[float]


def params_of(shapes: Shapes) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


class Subject:
    """One implementation with its own parameters. All ranks have the same gradients."""

    def __init__(self, name: str, shapes: Shapes) -> None:
        self.name = name
        self.params = params_of(shapes)
        view = name in (TORCH_VIEW, GREEDY_VIEW)
        self.zero: Any
        if name in (TORCH, TORCH_VIEW):
            self.zero = TorchZero(
                self.params,
                torch.optim.AdamW,
                parameters_as_bucket_view=view,
                lr=1e-4,
                weight_decay=0.1,
                fused=True,
            )
            return
        self.zero = ZeroRedundancyOptimizer(
            self.params,
            FusedAdamW,
            parameters_as_bucket_view=view,
            partition="balanced" if name == BALANCED else "greedy",
            lr=1e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
        )

    def run(self, operation: str) -> None:
        if self.name in (TORCH, TORCH_VIEW):
            clip_grad_norm_(self.params, 1.0)
            if operation == FULL:
                self.zero.step()
            else:
                self.zero._local_step()
            return
        # LOCAL leaves out the small all-reduce in the middle of ours.
        self.zero.optim.process_group = None if operation == LOCAL else self.zero.process_group
        if operation == FULL:
            self.zero.step()
        else:
            self.zero._local_step()

    def state_bytes(self) -> int:
        return sum(
            t.numel() * t.element_size()
            for state in self.zero.optim.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        )


def most(value: int) -> int:
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def timed(name: str, shapes: Shapes, rounds: int) -> list[dict[str, Any]]:
    subjects = [
        Subject(kind, shapes) for kind in (TORCH, TORCH_VIEW, GREEDY, GREEDY_VIEW, BALANCED)
    ]
    samples: dict[tuple[str, str], Samples] = {
        (s.name, operation): [] for s in subjects for operation in (LOCAL, STEP, FULL)
    }
    for number in range(rounds + 1):
        for subject in subjects if number % 2 else subjects[::-1]:
            for operation in (LOCAL, STEP, FULL):
                spent = sample(lambda s=subject, o=operation: s.run(o))  # type: ignore[misc]
                if number:  # the first round creates state and plans
                    samples[subject.name, operation].append(spent)
    held = {s.name: most(s.state_bytes()) for s in subjects}
    share = 8 * parameters(shapes) / dist.get_world_size()
    return [
        {
            "set": name,
            "parameters": parameters(shapes),
            "implementation": kind,
            "operation": operation,
            "milliseconds": statistics.median(mine),
            "samples": mine,
            "times_as_fast": paired(samples[TORCH, operation], mine),
            "times_as_fast_as_view": paired(samples[TORCH_VIEW, operation], mine),
            "state_bytes": held[kind],
            "state_over_share": held[kind] / share,
        }
        for (kind, operation), mine in samples.items()
    ]


class PeakMemory:
    """Measures how far the resident set rises above its size at construction (Linux)."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not be reused
        self.before = self._field("VmRSS")
        self.start()

    def start(self) -> None:
        """Resets the peak to the present resident set."""
        Path("/proc/self/clear_refs").write_text("5")

    def rise(self) -> int:
        """Returns the bytes from construction to the peak."""
        return self._field("VmHWM") - self.before

    @staticmethod
    def _field(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {name} in /proc/self/status")


def consolidated(elements: int, rounds: int) -> list[dict[str, Any]]:
    """Times consolidation of ``elements`` parameters' state, in tensors of 2**20 elements."""
    shapes = [(1024, 1024)] * (elements >> 20)
    samples: dict[str, Samples] = {}
    peaks: dict[str, list[int]] = {}
    for name in (TORCH, GREEDY, BALANCED):
        subject = Subject(name, shapes)
        subject.run(LOCAL)
        subject.zero.zero_grad()
        samples[name], peaks[name] = [], []
        for _ in range(1 if name == TORCH else rounds):  # torch's takes a minute a gigabyte
            above = PeakMemory()
            samples[name].append(sample(lambda s=subject: s.zero.consolidate_state_dict(to=0)))  # type: ignore[misc]
            peaks[name].append(most(above.rise() if dist.get_rank() else 0))
            subject.zero._all_state_dicts = []
            if name != TORCH:
                subject.zero._consolidated = None
        del subject
        gc.collect()
    return [
        {
            "implementation": name,
            "state_bytes": 8 * elements,
            "milliseconds": statistics.median(mine),
            "samples": mine,
            "times_as_fast": statistics.median(samples[TORCH]) / statistics.median(mine),
            "sender_peak_bytes": max(peaks[name]),
        }
        for name, mine in samples.items()
    ]


def loopback_bytes() -> int:
    """Returns the bytes that the loopback device sent, for all ranks of this machine (Linux)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("no lo in /proc/net/dev")


WAYS = {
    "torch, DDP": (TORCH, "ddp"),
    "greedy, DDP": (GREEDY, "ddp"),
    "balanced, DDP": (BALANCED, "ddp"),
    "balanced, DDP hook": (BALANCED, "hook"),
    "balanced, sharded_gradients": (BALANCED, "sharded"),
}


def trained(width: int, depth: int, rounds: int) -> list[dict[str, Any]]:
    """Times training steps, and measures bytes sent and the memory rise above the model."""
    rows = []
    for name, (kind, how) in WAYS.items():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        params = list(model.parameters())
        count = sum(p.numel() for p in params)
        above = PeakMemory()
        settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
        zero: Any
        if kind == TORCH:
            zero = TorchZero(params, torch.optim.AdamW, fused=True, **settings)
        else:
            zero = ZeroRedundancyOptimizer(
                params,
                FusedAdamW,
                partition=kind,
                sharded_gradients=how == "sharded",
                max_grad_norm=1.0,
                **settings,
            )
        run = model
        if how != "sharded":
            run = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if how == "hook":
                run.register_comm_hook(None, reduce_scatter_hook(zero))
        data = torch.randn(4, width)

        def step(zero: Any = zero, run: Any = run, kind: str = kind, data: Any = data) -> None:
            zero.zero_grad()
            run(data).square().mean().backward()
            if kind == TORCH:
                clip_grad_norm_(zero._all_params, 1.0)
            zero.step()

        above.start()
        for _ in range(3):  # DDP rebuilds its buckets in the second step
            step()
        peak = most(above.rise())
        samples, sent = [], []
        for _ in range(rounds):
            dist.barrier()
            before = loopback_bytes()
            samples.append(sample(step))
            sent.append(loopback_bytes() - before)
        rows.append(
            {
                "way": name,
                "parameters": count,
                "milliseconds": statistics.median(samples),
                "samples": samples,
                "sent_bytes_per_parameter": statistics.median(sent) / count / dist.get_world_size(),
                "peak_bytes_per_parameter": peak / count,
            }
        )
        del zero, run, model, params, layers, step
        gc.collect()
    return rows


def main() -> None:
    out, rounds, width, state_mib = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    large = f"GPT-2 of width {width}"
    sets: dict[str, Shapes] = {
        large: gpt2(50257, 1024, width, 12),
        SMALL: SETS[SMALL],
    }
    result: dict[str, Any] = {"world_size": dist.get_world_size(), "rows": []}
    for name, shapes in sets.items():
        result["rows"] += timed(name, shapes, rounds)
        gc.collect()
    result["training"] = trained(width * 4, 12, min(rounds, 5))
    result["consolidation"] = consolidated(state_mib << 17, 3)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
