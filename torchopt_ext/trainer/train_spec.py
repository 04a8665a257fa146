"""TrainSpec: everything that the Trainer has to know about a model, and model converters.

Both are registered by name.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchopt_ext.containers import LRSchedulersContainer, OptimizersContainer
from torchopt_ext.containers.lr_schedulers import build_lr_schedulers
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.data import build_dataloader
from torchopt_ext.trainer.extras import Registry
from torchopt_ext.trainer.metrics import MetricsProcessor
from torchopt_ext.trainer.optimizers import build_optimizers

__all__ = [
    "BaseModelArgs",
    "ModelConverter",
    "ModelProtocol",
    "TrainSpec",
    "apply_to_train_specs",
    "get_train_spec",
    "register_model_converter",
    "register_train_spec",
]

logger = logging.getLogger(__name__)

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Computes a batch's mean loss from the model's output and the labels."""


class BaseModelArgs(Protocol):
    """The sizes of a model."""

    def update_from_config(self, job_config: JobConfig, tokenizer: Any) -> None:
        """Takes over the job's settings, such as the sequence length."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Returns the number of parameters, and the FLOPs of forward and backward for one token."""


class ModelProtocol(Protocol):
    """The interface of a model for the Trainer, in addition to nn.Module's."""

    @classmethod
    def from_model_args(cls, model_args: Any) -> nn.Module:
        """Builds the model. The Trainer calls it on the meta device."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initializes weights and buffers, which have memory but no values yet."""


class ModelConverter(Protocol):
    """Changes a model before it is parallelized (torchtitan/protocols/model_converter.py)."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None: ...

    def convert(self, model: nn.Module) -> None:
        """Changes the model in place."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Runs after every optimizer step, with the model parts."""


def cross_entropy_loss(pred: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss of logits [batch, seq_len, vocabulary] and labels [batch, seq_len]."""
    return nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))


def build_cross_entropy_loss(job_config: JobConfig) -> LossFunction:
    """Returns `cross_entropy_loss`, compiled if the job says so and has no tensor parallelism."""
    whole = job_config.parallelism.tensor_parallel_degree == 1
    if job_config.training.compile and "loss" in job_config.compile.components and whole:
        compiled: LossFunction = torch.compile(cross_entropy_loss)
        return compiled
    return cross_entropy_loss


@dataclass
class TrainSpec:
    """A model, and the functions that build everything around it.

    The fields are those of torchtitan in April 2025.

    Attributes:
        name: `model.name` of the job.
        cls: the model's class, a :class:`ModelProtocol`.
        config: the model's sizes, each a :class:`BaseModelArgs`, by `model.flavor`.
        parallelize_fn: maps (model, world_mesh, parallel_dims, job_config) to the model.
        pipelining_fn: maps (model, world_mesh, parallel_dims, job_config, device, model_args,
            parallelize_fn, loss_fn) to (schedule, model_parts, has_first_stage, has_last_stage).
        build_optimizers_fn: maps (model_parts, job_config, ft_manager) to the container.
        build_lr_schedulers_fn: maps (optimizers, job_config) to the container.
        build_dataloader_fn: maps keywords dp_world_size, dp_rank, tokenizer and job_config to an
            iterable of ({"input": int64 [batch, seq_len]}, labels int64 [batch, seq_len]).
        build_tokenizer_fn: maps (job_config) to the tokenizer; None: no tokenizer.
        build_loss_fn: maps (job_config) to a LossFunction.
        build_metrics_processor_fn: maps (job_config, parallel_dims) to a MetricsProcessor, or an
            object with its methods; `log` also takes `extra_metrics`. None: ours.
    """

    name: str
    cls: type[nn.Module]
    config: Mapping[str, Any]
    parallelize_fn: Callable[..., nn.Module]
    pipelining_fn: Callable[..., tuple[Any, list[nn.Module], bool, bool]] | None
    build_optimizers_fn: Callable[..., OptimizersContainer[Any]] = build_optimizers
    build_lr_schedulers_fn: Callable[..., LRSchedulersContainer] = build_lr_schedulers
    build_dataloader_fn: Callable[..., Any] = build_dataloader
    build_tokenizer_fn: Callable[[JobConfig], Any] | None = None
    build_loss_fn: Callable[[JobConfig], LossFunction] = build_cross_entropy_loss
    build_metrics_processor_fn: Callable[..., MetricsProcessor] | None = None


_TRAIN_SPECS = Registry[TrainSpec]("model", "register_train_spec")
_CONVERTERS = Registry[type[ModelConverter]]("model converter", "register_model_converter")


def register_train_spec(train_spec: TrainSpec) -> None:
    """Registers a model under the TrainSpec's name, which must be new."""
    _TRAIN_SPECS.add(train_spec.name, train_spec)


get_train_spec = _TRAIN_SPECS.get
"""Returns the TrainSpec of a name. Raises ConfigError if it is not registered."""


def apply_to_train_specs(function: Callable[[TrainSpec], TrainSpec]) -> None:
    """Replaces every registered TrainSpec by `function(spec)`."""
    for name, spec in _TRAIN_SPECS.values.items():
        _TRAIN_SPECS.values[name] = function(spec)


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
