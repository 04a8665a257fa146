"""Per-parameter state that looks like torch's, and the plan built from it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._C import OptimizerPlan
from torchopt_ext.optim.local import NormKey, is_dtensor, local_gradient, local_tensor, norm_key

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def named_group_params(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], str, Tensor]]:
    """(group index, group, name or "", parameter) of every parameter, in order."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            yield index, group, name, param


def moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    """The moments a group's parameters have."""
    return MOMENTS if group["amsgrad"] else MOMENTS[:2]


def refuse_param(param: Tensor, what: str) -> None:
    """Raises TypeError for a parameter that no step could update.

    Torch's optimizers accept some of these and fail in ``step``; here the message comes at once.
    """
    if torch.nn.parameter.is_lazy(param):
        return  # its first forward gives it a shape
    wrapped = torch.utils._python_dispatch.is_traceable_wrapper_subclass(param)
    if wrapped and not is_dtensor(param):
        raise TypeError(f"{what} is a {type(param).__name__}, expected a plain tensor or a DTensor")
    local = local_tensor(param)
    if local.layout is not torch.strided:
        raise TypeError(f"{what} has layout {local.layout}, expected a dense tensor")
    if local.is_complex() or not local.is_floating_point() or local.element_size() == 1:
        raise TypeError(
            f"{what} has dtype {param.dtype}, expected float32, float64, bfloat16 or float16"
        )
    if local.is_meta:
        raise TypeError(f"{what} is on the meta device; materialise it before building optimizers")


def init_param_state(group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
    """Adds what is missing of a parameter's state: zeros of its dtype, and step 0."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
    for name in moments_of(group):
        if name not in state:
            zeros = torch.zeros_like(param, memory_format=torch.preserve_format)
            state[name] = zeros.requires_grad_(False)


def check_loaded_step(step: Any, what: str) -> None:
    """Raises ValueError unless ``step`` is a count: a number, or a tensor of one."""
    value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(value, bool | complex) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{what} is {step!r}, expected a count of steps")


def check_loaded_moment(moment: Any, param: Tensor, what: str) -> None:
    """Raises ValueError unless ``moment`` is a real tensor with memory, shaped as the parameter."""
    if not isinstance(moment, Tensor):
        raise ValueError(f"{what} is a {type(moment).__name__}, expected a tensor")
    if moment.shape != param.shape:
        raise ValueError(f"{what} has shape {tuple(moment.shape)}, expected {tuple(param.shape)}")
    local = local_tensor(moment)
    if local.layout is not torch.strided or not local.is_floating_point() or local.is_meta:
        raise ValueError(
            f"{what} is {moment.dtype}, {local.layout}, on {moment.device}; expected a dense real "
            f"tensor with memory"
        )


def _fit_step(step: Any, device: torch.device) -> Tensor:
    """A step count as one float32 element on ``device``, whatever an older state dict holds."""
    check_loaded_step(local_tensor(step), "step")
    if not isinstance(step, Tensor):
        return torch.tensor(float(step), dtype=torch.float32, device=device)
    step = local_tensor(step)
    fits = step.dtype == torch.float32 and step.device == device and step.numel() == 1
    return step if fits else step.detach().to(device, torch.float32).reshape(())


def _fit_moment(moment: Tensor, param: Tensor, what: str) -> Tensor:
    """A moment on the parameter's device and in its storage order, copied only if it was not."""
    check_loaded_moment(moment, param, what)
    local, like = local_tensor(moment), local_tensor(param)
    dense = torch.empty_like(like, dtype=local.dtype, memory_format=torch.preserve_format)
    if local.device == like.device and local.stride() == dense.stride():
        return moment
    fitted = torch.zeros_like(param, dtype=moment.dtype, memory_format=torch.preserve_format)
    local_tensor(fitted).copy_(local)
    return fitted.requires_grad_(False)


def build_plan(optimizer: Optimizer) -> tuple[OptimizerPlan, list[NormKey]]:
    """A plan for every parameter that has state, and the norm key of each of its parts.

    State entries that do not fit their parameter (other device, other strides, a step that is a
    number) are replaced in ``optimizer.state`` by ones that do.

    Raises:
        ValueError: a state entry has another shape than its parameter.
        RuntimeError: what csrc/plan/step_plan.h refuses.
    """
    params: list[tuple[Any, ...]] = []
    parts: dict[tuple[torch.device, NormKey], int] = {}
    idle: list[Tensor] = []
    for index, group, name, param in named_group_params(optimizer):
        state = optimizer.state.get(param)
        if not state:
            idle.append(param)
            continue
        init_param_state(group, param, state)
        local = local_tensor(param)
        what = repr(name) if name else f"parameter {len(params)}"
        state["step"] = _fit_step(state["step"], local.device)
        for moment in moments_of(group):
            state[moment] = _fit_moment(state[moment], param, f"{moment} of {what}")
        moments = [local_tensor(state[moment]) for moment in moments_of(group)]
        moments += [None] * (len(MOMENTS) - len(moments))
        part = parts.setdefault((local.device, norm_key(param)), len(parts))
        params.append((param, (local, *moments, state["step"]), index, name, part))
    plan = OptimizerPlan(
        optimizer.param_groups,
        optimizer.state,
        params,
        [device for device, _ in parts],
        idle,
        local_gradient,
    )
    return plan, [key for _, key in parts]
