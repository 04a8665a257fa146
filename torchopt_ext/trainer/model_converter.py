"""Model converters: changes to a model before it is made parallel, by name, as torchtitan's.

After torchtitan/protocols/model_converter.py.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from torchopt_ext.trainer.config import ConfigError, JobConfig

logger = logging.getLogger(__name__)


class ModelConverter(Protocol):
    """Changes a model in place, such as from linear layers to quantized ones."""

    def convert(self, model: nn.Module) -> None:
        """Called once, with the whole model on the meta device."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Called after every optimizer step, with this rank's model parts."""


_converters: dict[str, Callable[[JobConfig, Any], ModelConverter]] = {}


def register_model_converter(name: str, cls: Callable[[JobConfig, Any], ModelConverter]) -> None:
    """Makes a converter known to `model.converters`.

    Args:
        name: of the converter.
        cls: called with the job's configuration and its ParallelDims.

    Raises:
        ValueError: the name is taken.
    """
    if name in _converters:
        raise ValueError(f"a model converter named {name!r} is registered already")
    _converters[name] = cls


class ModelConvertersContainer:
    """The converters that `model.converters` names, one after another."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None:
        for name in job_config.model.converters:
            if name not in _converters:
                known = ", ".join(map(repr, sorted(_converters))) or "none"
                raise ConfigError(
                    f"model.converters names {name!r}, which is not registered (registered: "
                    f"{known}): call torchopt_ext.trainer.register_model_converter({name!r}, ...) "
                    "in a module that experimental.custom_import names"
                )
        names = job_config.model.converters
        self.converters = [_converters[name](job_config, parallel_dims) for name in names]
        self.print_after_conversion = job_config.model.print_after_conversion

    def convert(self, model: nn.Module) -> None:
        """Applies the converters in the order of their names."""
        for converter in self.converters:
            converter.convert(model)
        if self.print_after_conversion:
            logger.info("Model after conversion:\n\n%s\n\n", model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Calls the converters' hooks, in the same order."""
        for converter in self.converters:
            converter.post_optimizer_hook(model)


def build_model_converters(job_config: JobConfig, parallel_dims: Any) -> ModelConvertersContainer:
    """The converters of a job.

    Raises:
        ConfigError: a name is not registered; says what is, and how to register.
    """
    return ModelConvertersContainer(job_config, parallel_dims)
