"""Errors of a sharded optimizer name parameters as the user does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchopt_ext.zero.parameters import Parameters

WEIGHTS = [torch.ones(2, 3), torch.ones(3)]


@pytest.mark.parametrize(
    ("group", "of_container", "expected"),
    [
        ({"param_names": ["wq", "wk"]}, (), "parameter 'wk' of shape (3,)"),
        ({}, [["wq", "wk"]], "parameter 'wk' of shape (3,)"),
        ({}, (), "parameter 1 of shape (3,)"),
    ],
)
def test_parameters_have_the_users_names(
    group: dict[str, Any], of_container: Any, expected: str
) -> None:
    params = Parameters([{"params": WEIGHTS, **group}])
    params.parameter_names = of_container
    assert params.called(WEIGHTS[1]) == expected
    assert params.called(torch.ones(4)) == "a parameter of shape (4,)"


def test_a_gradient_of_a_frozen_parameter_is_named() -> None:
    frozen = torch.ones(2, requires_grad=True)
    params = Parameters([{"params": [frozen], "param_names": ["wq"]}])
    params.check_frozen([frozen])
    frozen.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"parameter 'wq' of shape \(2,\) has a gradient"):
        params.check_frozen([frozen])


def test_parameters_that_share_memory_are_named() -> None:
    whole = torch.ones(6)
    params = Parameters([{"params": [whole[:4], whole[3:]], "param_names": ["wq", "wk"]}])
    with pytest.raises(RuntimeError, match=r"'wq' of shape \(4,\) and parameter 'wk' of shape"):
        params.check_untied()
    Parameters([{"params": [whole[:3], whole[3:]]}]).check_untied()
