"""Prints digests of operator results, to compare instruction sets and float modes.

test_capabilities.py runs it in separate processes: torch reads ATEN_CPU_CAPABILITY once.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "golden")]

from exact_reference import DTYPES, name_of, random_elements, raw  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from torchopt_ext import FusedLion, FusedMuon, FusedSGD, ops, orthogonalize  # noqa: E402

MATRICES = [(32, 32), (1, 40), (50, 1), (37, 41), (65, 30), (20, 270)]
SHAPES = [(20_001,), (200, 63), (9, 64), (2, 9001), (3, 4096), (1, 129)]
OTHERS = {
    "lion": (FusedLion, torch.float32, {}),
    "sgd": (FusedSGD, torch.float32, {"momentum": 0.9}),
    "muon": (FusedMuon, torch.float32, {"adjust_lr_fn": "match_rms_adamw"}),
    "muon, fp64": (FusedMuon, torch.float64, {}),
    "normuon": (FusedMuon, torch.float32, {"beta2": 0.9}),
}
FE_TONEAREST, FE_TOWARDZERO = 0, 0xC00  # <fenv.h> of x86-64


def digest(tensors: list[Tensor]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(ctypes.string_at(raw(tensor).data_ptr(), tensor.nbytes))
    return result.hexdigest()[:16]


def adam_inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    count = torch.Size(shape).numel()
    return [
        random_elements(dtype, count, k, -60, 3, signed=k not in (3, 4), specials=True).view(shape)
        for k in range(5)
    ]


def set_mode(mode: str) -> None:
    torch.set_flush_denormal(mode == "flush")
    rounding = FE_TOWARDZERO if mode == "truncate" else FE_TONEAREST
    assert ctypes.CDLL("libm.so.6").fesetround(rounding) == 0


def compute(mode: str) -> dict[str, str]:
    digests = {}
    torch.set_num_threads(1)
    set_mode("plain")
    # Made in plain mode, as torch's own operations follow the float mode.
    sources = {dtype: [adam_inputs(dtype, shape) for shape in SHAPES] for dtype in DTYPES}
    finite = {
        (dtype, shape, low): random_elements(
            dtype, torch.Size(shape).numel(), 9, low, low + 30
        ).view(shape)
        for dtype in DTYPES
        for shape in SHAPES
        for low in (-20, -149)
    }
    matrices, gradients = (
        [
            random_elements(torch.float32, torch.Size(shape).numel(), seed, -30, 3).view(shape)
            for shape in MATRICES
        ]
        for seed in (11, 12)
    )
    steps = torch.arange(10 * len(SHAPES), dtype=torch.int64).tolist()
    schedule = {"warmup_steps": 7, "stable_steps": 5, "decay_steps": 40, "decay_type": "cosine"}
    set_mode(mode)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for preset in ("jordan", "polar_express"):
            digests[f"orthogonalize {preset}, {threads} threads"] = digest(
                [orthogonalize(x, preset) for x in matrices]
            )
        for name, (cls, dtype, options) in OTHERS.items():
            params = [nn.Parameter(x.to(dtype, copy=True)) for x in matrices]
            optimizer = cls(params, lr=0.02, weight_decay=0.1, max_grad_norm=1.0, **options)
            for _ in range(2):
                for p, gradient in zip(params, gradients, strict=True):
                    p.grad = gradient.to(dtype)
                optimizer.step()
            held = [x for p in params for x in optimizer.state[p].values()]
            digests[f"{name}, {threads} threads"] = digest(params + held)
        for dtype in DTYPES:
            name = f"{name_of(dtype)}, {threads} threads"
            for decoupled in (True, False):
                work = [[x.clone() for x in tensors] for tensors in sources[dtype]]
                counts = [torch.tensor(float(3 * k)) for k in range(len(work))]
                for beta1, maximize in ((0.9, False), (0.4, True)):
                    p, g, m, v, vmax = (list(column) for column in zip(*work, strict=True))
                    ops.adam_(
                        p, g, m, v, vmax if decoupled else [], counts, ops.new_control(),
                        lr=1e-3, beta1=beta1, beta2=0.99, eps=1e-8, weight_decay=0.1,
                        decoupled_weight_decay=decoupled, maximize=maximize,
                    )  # fmt: skip
                digests[f"adam {decoupled}, {name}"] = digest(
                    [x for tensors in work for x in tensors] + counts
                )
            results = []
            for shape in SHAPES:
                for grads in (
                    [finite[dtype, shape, -20]],
                    [finite[dtype, shape, -149]],
                    [finite[dtype, shape, -149], *sources[dtype][0][:1]],
                ):
                    accumulator = ops.new_accumulator()
                    ops.grad_sumsq_(grads, accumulator)
                    total = ops.accumulator_total(accumulator)
                    control = ops.new_control(max_grad_norm=0.3)
                    ops.control_update_(control, accumulator, torch.tensor(3.0))
                    results += [accumulator, total, control]
            digests[f"sumsq {name}"] = digest(results)
            results = []
            for to_dtype in DTYPES:
                if (to_dtype == torch.float64) == (dtype == torch.float64):
                    for unscale in (True, False):
                        results += [torch.empty(x[0].shape, dtype=to_dtype) for x in sources[dtype]]
                        ops.scaled_copy_(
                            results[-len(SHAPES) :],
                            [x[0] for x in sources[dtype]],
                            ops.new_control(grad_factor=0.3),
                            unscale=unscale,
                        )
            digests[f"scaled copy {name}"] = digest(results)
    factors = [ops.lr_factor(s, **schedule) for s in steps]
    digests["lr_factor"] = digest([torch.tensor(factors, dtype=torch.float64)])
    return digests


if __name__ == "__main__":
    results = {mode: compute(mode) for mode in sys.argv[1:]}
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), **results}))
