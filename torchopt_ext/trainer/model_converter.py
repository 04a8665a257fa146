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


def convert_model(
    model: nn.Module, job_config: JobConfig, parallel_dims: Any
) -> list[ModelConverter]:
    """Applies the converters of `model.converters` in their order, and returns them."""
    classes = [*map(_CONVERTERS.get, job_config.model.converters)]
    converters = [converter(job_config, parallel_dims) for converter in classes]
    for converter in converters:
        converter.convert(model)
    if job_config.model.print_after_conversion:
        logger.info("Model after conversion:\n%s", model)
    return converters
