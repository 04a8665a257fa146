"""Model converters, which change a model before it is parallelized, such as to low precision."""

import logging
from typing import Any, Protocol

from torch import nn

from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.registry import Registry

logger = logging.getLogger(__name__)


class ModelConverter(Protocol):
    """The interface of a converter, as in torchtitan/protocols/model_converter.py."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None: ...

    def convert(self, model: nn.Module) -> None:
        """Changes the model in place."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Runs after every optimizer step, with the model parts."""


_CONVERTERS = Registry[type[ModelConverter]]("model converter", "register_model_converter")


def register_model_converter(converter_cls: type[ModelConverter], name: str) -> None:
    """Registers a converter under a new name for `model.converters`."""
    _CONVERTERS.add(name, converter_cls)


class ModelConvertersContainer:
    """The converters of a job, in the order of `model.converters`."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None:
        classes = [*map(_CONVERTERS.get, job_config.model.converters)]
        self.converters = [converter(job_config, parallel_dims) for converter in classes]
        self._print = job_config.model.print_after_conversion

    def convert(self, model: nn.Module) -> None:
        for converter in self.converters:
            converter.convert(model)
        if self._print:
            logger.info("Model after conversion:\n%s", model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for converter in self.converters:
            converter.post_optimizer_hook(model)
