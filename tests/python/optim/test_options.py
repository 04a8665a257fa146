"""The step's options: one declaration, which constructors and configurations follow."""

import dataclasses
import inspect
import math
import pickle
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdam, FusedAdamW
from torchopt_ext.optim.options import (
    CONFIGURED,
    DECAY,
    DEFAULTS,
    StepArguments,
    StepOptions,
    configures_step,
)
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.load_config import settings_of


def adam(**options: Any) -> FusedAdam:
    return FusedAdam([nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
def test_signatures_show_every_option(cls: type[FusedAdam]) -> None:
    shown = inspect.signature(cls).parameters
    every = DECAY | DEFAULTS
    assert get_type_hints(StepArguments).keys() == every.keys()
    assert {name: shown[name].default for name in every} == every
    assert {shown[name].kind for name in every} == {inspect.Parameter.KEYWORD_ONLY}
    assert "options" not in shown


def test_options_are_those_of_the_next_step() -> None:
    assert adam().options == StepOptions()
    optimizer = adam(track=True, rounding_seed=7, stochastic_rounding=True, state_dtype="int8")
    optimizer.max_grad_norm, optimizer.skip_nonfinite = math.inf, True
    expected = StepOptions(
        track=("norms", "lost_updates"),
        rounding_seed=7,
        stochastic_rounding=True,
        state_dtype=torch.int8,
        max_grad_norm=math.inf,
        skip_nonfinite=True,
    )
    assert optimizer.options == expected
    assert pickle.loads(pickle.dumps(optimizer)).options == expected
    plain = adam()
    plain._keep_masters()
    assert plain.options == StepOptions(master_weights="fp32")


def test_configurations_have_the_options_as_files_write_them() -> None:
    @dataclasses.dataclass
    @configures_step("rounding_seed")
    class Section:
        skip_nonfinite: bool = True

    first, second = Section(), Section()
    names = set(dataclasses.asdict(first))
    assert names == {*CONFIGURED} - {"rounding_seed"}
    assert vars(first)["skip_nonfinite"] is True
    assert vars(first)["fp32_moments"] == ["embedding"]
    vars(first)["track"].append("norms")
    assert vars(second)["track"] == []
    for kind in get_type_hints(Section, include_extras=True).values():
        texts = [text.documentation for text in getattr(kind, "__metadata__", ())]
        assert kind is bool or [text[0].isupper() and text[-1] == "." for text in texts] == [True]


def test_a_job_sets_every_option_of_files() -> None:
    settings = settings_of(JobConfig)
    names = {name for name in CONFIGURED if f"optimizer.{name}" in settings}
    assert names == {*CONFIGURED} - {"max_grad_norm"}  # training.max_norm
