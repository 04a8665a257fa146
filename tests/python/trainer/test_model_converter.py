"""Model converters are found by name and applied in order."""

import logging
from typing import Any

import pytest
from torch import nn

from torchopt_ext.trainer import train_spec
from torchopt_ext.trainer.config import ConfigError, JobConfig, Model
from torchopt_ext.trainer.train_spec import convert_model, register_model_converter


class Noting:
    """A converter that notes its calls, and the model's layers at that time."""

    def __init__(self, job_config: JobConfig, parallel_dims: list[Any]) -> None:
        self.calls = parallel_dims

    def convert(self, model: Any) -> None:
        model.append(nn.Identity())
        self.calls.append((type(self).__name__, len(model)))

    def post_optimizer_hook(self, model: Any) -> None:
        self.calls.append((type(self).__name__, model))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_spec._CONVERTERS, "values", {})
    for name in ("one", "two"):
        register_model_converter(type(name, (Noting,), {}), name)


@pytest.mark.parametrize("names", [["one", "two"], ["two", "one"], []])
def test_converters_run_in_the_order_of_their_names(names: list[str]) -> None:
    calls: list[Any] = []
    for converter in convert_model(
        nn.Sequential(), JobConfig(model=Model(converters=names)), calls
    ):
        converter.post_optimizer_hook(["part"])
    hooks = [(name, ["part"]) for name in names]
    assert calls == [(name, number) for number, name in enumerate(names, start=1)] + hooks


def test_the_converted_model_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    for asked in (False, True):
        settings = Model(converters=["one"], print_after_conversion=asked)
        with caplog.at_level(logging.INFO):
            convert_model(nn.Sequential(), JobConfig(model=settings), [])
        assert ("(0): Identity" in caplog.text) == asked


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="'two' is registered already"):
        register_model_converter(Noting, "two")
    calls: list[Any] = []
    with pytest.raises(ConfigError, match=r"'float8'.*\(registered: 'one', 'two'\).*custom_import"):
        convert_model(nn.Sequential(), JobConfig(model=Model(converters=["one", "float8"])), calls)
    assert calls == []
