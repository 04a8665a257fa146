"""Parameters, gradients, and steps with them."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = ((3, 4), (7,), (), (2, 3, 5))


def make_params(
    shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(random_tensor(shape, dtype, generator)) for shape in shapes]


def random_tensor(
    shape: Iterable[int], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Returns normal values, of float32 before they are rounded, also under another default."""
    drawn_as = dtype if dtype.is_complex else torch.float32
    return (torch.randn(tuple(shape), generator=generator, dtype=drawn_as) * scale).to(dtype)


def copy_params(params: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)


def params_of(optimizer: Any) -> list[Any]:
    """Returns the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(*param_lists: Iterable[Tensor], seed: int = 0, scale: float = 1.0) -> None:
    """Gives every list of parameters the same random gradients, in their ``grad_dtype``."""
    for params in param_lists:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            dtype = getattr(p, "grad_dtype", None) or p.dtype
            p.grad = random_tensor(p.shape, dtype, generator, scale)


def clip_skip_or_leave_out(params: list[nn.Parameter], optimizer: Any, seed: int) -> None:
    """Makes a clipped step; for seed 2 one that is skipped, for 3 one with fewer gradients."""
    set_gradients(params, seed=seed)
    if seed == 2:
        params[0].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    if seed == 3:
        params[1].grad = None
    optimizer.step()


def train(
    optimizer: Any, seeds: Iterable[int], params: Iterable[Tensor] | None = None, scale: float = 1.0
) -> None:
    """Makes a step with the random gradients of each seed, by default for all its parameters."""
    for seed in seeds:
        set_gradients(params_of(optimizer) if params is None else params, seed=seed, scale=scale)
        optimizer.step()


def through_file(value: Any) -> Any:
    """Returns what ``torch.load`` reads of a saved value, without running code of the file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def copied(optimizer: Any, **options: Any) -> Any:
    """Returns an optimizer of the same class, groups and state over copies of the parameters."""
    groups = []
    for group in optimizer.param_groups:
        copies = copy_params(group["params"])
        for p, q in zip(group["params"], copies, strict=True):
            q.requires_grad_(p.requires_grad)
            q.grad = None if p.grad is None else p.grad.detach().clone()
        groups.append({**group, "params": copies})
    copied = type(optimizer)(groups, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {key: entry for key, entry in saved["state"].items() if entry}
    copied.load_state_dict(saved)
    return copied
