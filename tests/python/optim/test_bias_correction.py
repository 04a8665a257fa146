"""bias_correction=False: the moments are used as they are, as in apex and TransformerEngine."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from torchopt_ext import FusedAdam
from torchopt_ext.optim.joint import JointStep, only_param
from torchopt_ext.zero.functional import functional_optim_map

from .subject import OURS, bits, copy_params, each_class, make_params, set_gradients, train

WRONG = r"bias_correction is .*, expected a bool"
FULL = 2.0**20  # steps after which beta**step is 0 in float64: the corrections are exactly 1


@each_class
def test_formula(name: str) -> None:
    """Against the formula in torch operators, in float64, for one group of two."""
    params = make_params(dtype=torch.float64)
    first, second = params[:2], params[2:]
    weights = copy_params(params)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in weights]
    groups = [{"params": first, "bias_correction": False}, {"params": second}]
    optimizer = OURS[name](groups, lr=0.1, betas=(0.8, 0.99), weight_decay=0.2)
    for step in range(1, 4):
        set_gradients(params, weights, seed=step)
        optimizer.step()
        for i, (weight, (m, v)) in enumerate(zip(weights, moments, strict=True)):
            with torch.no_grad():
                grad = weight.grad if name == "AdamW" else weight.grad + 0.2 * weight
                m.lerp_(grad, 0.2)
                v.lerp_(grad.square(), 0.01)
                c1, c2 = (1, 1) if i < len(first) else (1 - 0.8**step, 1 - 0.99**step)
                decay = 0.1 * 0.2 * weight if name == "AdamW" else 0
                weight -= decay + 0.1 * (m / c1) / ((v / c2).sqrt() + 1e-8)
    for ours, weight in zip(params, weights, strict=True):
        torch.testing.assert_close(ours, weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"amsgrad": True, "max_grad_norm": 0.5}),
        (torch.float32, {"state_dtype": "int8", "fp32_moments": ()}),
        (torch.bfloat16, {"master_weights": "fp32"}),
        (torch.bfloat16, {"master_weights": "remainder8", "state_dtype": "int8"}),
        (torch.float16, {}),
    ],
)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_bits_are_those_after_many_steps(
    dtype: torch.dtype, options: dict[str, Any], tensor_lr: bool
) -> None:
    shapes = [(3, 130), (7,), ()]
    params, others = make_params(shapes, dtype), make_params(shapes, dtype)
    build = partial(OURS["AdamW"], lr=torch.tensor(1e-2) if tensor_lr else 1e-2, **options)
    without, after = build(params, bias_correction=False), build(others)
    for optimizer in (without, after):  # both: the dither of 8-bit moments depends on the count
        optimizer._init_states(lambda param: True)
        for state in optimizer.state.values():
            state["step"].fill_(FULL)
    train([without, after], [params, others], 3)
    for p, q in zip(params, others, strict=True):
        assert bits(p) == bits(q)
        for key in without.state[p].keys() - {"step"}:
            assert bits(without.state[p][key]) == bits(after.state[q][key]), key


def test_groups_have_torchs_keys_unless_it_is_off() -> None:
    """A checkpoint of torchtitan, for example, has no other keys."""
    on, off = (OURS["Adam"](make_params(), bias_correction=value) for value in (True, False))
    torchs = torch.optim.Adam(make_params())
    assert on.param_groups[0].keys() == torchs.param_groups[0].keys()
    assert off.state_dict()["param_groups"][0]["bias_correction"] is False
    off.load_state_dict(torchs.state_dict())  # has no value, so the optimizer's stays
    assert off.param_groups[0]["bias_correction"] is False
    on.load_state_dict(off.state_dict())
    assert on.param_groups[0]["bias_correction"] is False
    assert deepcopy(on).param_groups[0]["bias_correction"] is False


@pytest.mark.parametrize("value", ["no", 2])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match=WRONG):
        FusedAdam(make_params(), bias_correction=value)
    with pytest.raises(TypeError, match=WRONG):
        FusedAdam([{"params": make_params(), "bias_correction": value}])
    params = make_params()
    optimizer = FusedAdam(params)
    optimizer.param_groups[0]["bias_correction"] = "no"
    set_gradients(params)
    with pytest.raises(TypeError, match=WRONG):
        optimizer.step()


def test_joint_and_functional_steps() -> None:
    params = make_params()
    joint, functional, whole = (copy_params(params) for _ in range(3))
    values = [index % 2 == 0 for index in range(len(params))]
    singles = [
        FusedAdam([p], bias_correction=value) for p, value in zip(joint, values, strict=True)
    ]
    assert [only_param(single) for single in singles] == joint
    together = JointStep(singles)
    apart = [
        functional_optim_map[FusedAdam]([p], bias_correction=value)
        for p, value in zip(functional, values, strict=True)
    ]
    groups = [{"params": [p], "bias_correction": v} for p, v in zip(whole, values, strict=True)]
    optimizer = FusedAdam(groups)
    for step in range(3):
        set_gradients(joint, functional, whole, seed=step)
        optimizer.step()
        together.step_all(FusedAdam.step)
        for one, param in zip(apart, functional, strict=True):
            one.step([param.grad])
    for a, b, c in zip(joint, functional, whole, strict=True):
        assert bits(a) == bits(b) == bits(c)
