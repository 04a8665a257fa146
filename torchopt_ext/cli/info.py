"""python -m torchopt_ext info: shows what is installed and built, and tests a step."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import torchopt_ext
from torchopt_ext import _C, FusedAdamW, _build_info
from torchopt_ext.cli.terminal import WIDTH, table

PACKAGES = (
    "numpy", "torchtitan", "torchft", "tyro", "tqdm", "matplotlib", "safetensors", "tensorboard",
)  # fmt: skip
TOLERANCE = 1e-6
"""Largest error of a parameter of size 1 after the steps. float32 rounds to 6e-8."""


def main(options: Any) -> int:
    facts = report()
    print(json.dumps(facts, indent=2) if options.json else as_text(facts))
    return 0 if all(test["passed"] for test in facts["self_test"].values()) else 1


def report() -> dict[str, Any]:
    """Returns the whole report in JSON's types."""
    devices = ["cpu"]
    if torchopt_ext.cuda_built() and torch.cuda.is_available():
        devices += [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    return {
        "versions": {
            "torchopt_ext": torchopt_ext.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "installed_at": str(Path(torchopt_ext.__file__).parent),
        "platform": platform.platform(),
        "built": {
            "torch": _build_info.TORCH_VERSION,
            "cuda": _build_info.CUDA_VERSION,
            "cuda_architectures": _build_info.CUDA_ARCHITECTURES or None,
            "compiler": _build_info.CXX_COMPILER,
        },
        "cpu": {
            "name": processor(),
            "instruction_set": _C.cpu_kernels(),
            "threads": torch.get_num_threads(),
            "processors": len(os.sched_getaffinity(0)),
        },
        "cuda": {
            "built": torchopt_ext.cuda_built(),
            "torch": torch.version.cuda,
            "usable": len(devices) > 1,
            "devices": [torch.cuda.get_device_name(device) for device in devices[1:]],
        },
        "self_test": {device: self_test(device) for device in devices},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Returns the processor's name, from Linux if possible."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- the test ------------------------------------------------------------------------------------


def self_test(device: str) -> dict[str, Any]:
    """Makes three clipped steps over tensors of several sizes, and reports their largest error."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (63,), (64, 65), (3, 5000)]
    start, *grads = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(4)]
    try:
        pairs = zip(stepped(start, grads, device), stepped(start, grads, None), strict=True)
        error = max(float((param - expected).abs().max()) for param, expected in pairs)
    except RuntimeError as problem:  # for example out of device memory
        return {"passed": False, "problem": " ".join(str(problem).split())}
    return {"passed": error <= TOLERANCE, "largest_error": error}


def stepped(start: list[Tensor], grads: list[list[Tensor]], device: str | None) -> list[Tensor]:
    """Steps on a device, or if there is none by torch's AdamW with clipping, in float64."""
    to: dict[str, Any] = {"device": device or "cpu", "copy": True}
    to["dtype"] = torch.float32 if device else torch.float64
    params = [value.to(**to).requires_grad_() for value in start]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if device:
        optimizer: Any = FusedAdamW(params, max_grad_norm=1.0, **options)
    else:
        optimizer = torch.optim.AdamW(params, **options)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.to(**to)
        if not device:
            clip_grad_norm_(params, 1.0)
        optimizer.step()
    return [param.detach().cpu().double() for param in params]


# ---- text ----------------------------------------------------------------------------------------


def as_text(facts: dict[str, Any]) -> str:
    built, cpu, cuda, versions = (facts[key] for key in ("built", "cpu", "cuda", "versions"))
    others = {name: v for name, v in versions.items() if v is not None and name in PACKAGES}
    missing = [name for name in PACKAGES if versions[name] is None]
    sections = {
        "torchopt_ext": versions["torchopt_ext"],
        "torch": f"{versions['torch']}; built against {built['torch']}",
        "Python": versions["python"],
        "compiler": built["compiler"],
        "CPU": cpu["name"],
        "instructions": cpu["instruction_set"],
        "threads": f"{cpu['threads']} of {cpu['processors']} processors",
        "CUDA": cuda_text(cuda, built),
        "with": ", ".join(f"{name} {v}" for name, v in others.items()),
        "without": ", ".join(missing),
    }
    lines = [
        textwrap.fill(f"{name:13} {text}", WIDTH, subsequent_indent=14 * " ")
        for name, text in sections.items()
        if text
    ]
    rows, problems = [], []
    for device, test in facts["self_test"].items():
        seen = f"{test['largest_error']:.1e}" if "largest_error" in test else ""
        rows.append([device, "passed" if test["passed"] else "failed", seen])
        if "problem" in test:
            problems += ["", textwrap.fill(f"{device}: {test['problem']}", WIDTH)]
    return "\n".join([*lines, "", table(["step on", "", "largest error"], rows), *problems])


def cuda_text(cuda: dict[str, Any], built: dict[str, Any]) -> str:
    if not cuda["built"]:
        return "not built"
    kernels = f"built with {built['cuda']} for {built['cuda_architectures']}"
    if cuda["usable"]:
        return f"{kernels}; usable: {', '.join(sorted(set(cuda['devices'])))}"
    reason = "torch finds no device" if cuda["torch"] else "torch is a build without CUDA"
    return f"{kernels}; not usable: {reason}"
