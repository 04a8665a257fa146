"""Model converters, which change a model before it is parallelized, such as to low precision."""

import logging
from typing import Any, Protocol

from torch import nn

from torchopt_ext.trainer.config import ConfigError, JobConfig

logger = logging.getLogger(__name__)


class ModelConverter(Protocol):
    """The interface of a converter, as in torchtitan/protocols/model_converter.py."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None: ...

    def convert(self, model: nn.Module) -> None:
        """Changes the model in place."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Runs after every optimizer step, with the model parts."""


_registered: dict[str, type[ModelConverter]] = {}


def register_model_converter(converter_cls: type[ModelConverter], name: str) -> None:
    """Registers a converter under a name for `model.converters`.

    Raises:
        ValueError: The name is registered already.
    """
    if name in _registered:
        raise ValueError(f"a model converter named {name!r} is registered already")
    _registered[name] = converter_cls


class ModelConvertersContainer:
    """The converters of a job, in the order of `model.converters`.

    Raises:
        ConfigError: A name is not registered.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None:
        names = job_config.model.converters
        for name in names:
            if name not in _registered:
                known = ", ".join(map(repr, sorted(_registered))) or "none"
                raise ConfigError(
                    f"model.converters has {name!r}, which is not registered (registered: "
                    f"{known}): call torchopt_ext.trainer.register_model_converter in a module "
                    "that experimental.custom_import names"
                )
        self.converters = [_registered[name](job_config, parallel_dims) for name in names]
        self._print = job_config.model.print_after_conversion

    def convert(self, model: nn.Module) -> None:
        for converter in self.converters:
            converter.convert(model)
        if self._print:
            logger.info("Model after conversion:\n%s", model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for converter in self.converters:
            converter.post_optimizer_hook(model)


def build_model_converters(job_config: JobConfig, parallel_dims: Any) -> ModelConvertersContainer:
    return ModelConvertersContainer(job_config, parallel_dims)
