"""Model converters are found by name and applied in order."""

import logging

import pytest
from torch import nn

from torchopt_ext.trainer import train_spec
from torchopt_ext.trainer.config import ConfigError, JobConfig, Model
from torchopt_ext.trainer.train_spec import convert_model, register_model_converter

CALLS: list[tuple[str, object]] = []


class Widen:
    def __init__(self, job_config: JobConfig, parallel_dims: object) -> None:
        CALLS.append(("built", (job_config.model.name, parallel_dims)))

    def convert(self, model: nn.Module) -> None:
        CALLS.append(("widen", model))
        model.wide = nn.Linear(2, 7)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        CALLS.append(("widen hook", model))


class Note(Widen):
    def convert(self, model: nn.Module) -> None:
        CALLS.append(("note", hasattr(model, "wide")))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        CALLS.append(("note hook", model))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_spec._CONVERTERS, "values", {})
    register_model_converter(Widen, "widen")
    register_model_converter(Note, "note")
    CALLS.clear()


@pytest.mark.parametrize("names", [["widen", "note"], ["note", "widen"], []])
def test_converters_run_in_the_order_of_their_names(names: list[str]) -> None:
    model = nn.Module()
    for converter in convert_model(model, JobConfig(model=Model(converters=names)), "dims"):
        converter.post_optimizer_hook([model])
    wide_before = names == ["widen", "note"]
    said = {"widen": model, "note": wide_before, "widen hook": [model], "note hook": [model]}
    expected = [("built", ("llama3", "dims")) for _ in names]
    expected += [(call, said[call]) for call in [*names, *(f"{name} hook" for name in names)]]
    assert expected == CALLS


def test_the_converted_model_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (False, True):
        settings = Model(converters=["widen"], print_after_conversion=wanted)
        with caplog.at_level(logging.INFO):
            convert_model(nn.Module(), JobConfig(model=settings), None)
        assert ("(wide): Linear" in caplog.text) == wanted


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="'note' is registered already"):
        register_model_converter(Widen, "note")
    with pytest.raises(
        ConfigError, match=r"'float8'.*\(registered: 'note', 'widen'\).*custom_import"
    ):
        convert_model(nn.Module(), JobConfig(model=Model(converters=["note", "float8"])), None)
    assert CALLS == []
