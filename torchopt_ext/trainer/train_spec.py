"""TrainSpec: what the Trainer has to know of a model, and the registry of them by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchopt_ext.containers import LRSchedulersContainer, OptimizersContainer
from torchopt_ext.containers.lr_schedulers import build_lr_schedulers
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.data import build_dataloader
from torchopt_ext.trainer.metrics import MetricsProcessor
from torchopt_ext.trainer.optimizers import build_optimizers

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From what the model returns and the labels to a batch's mean loss."""


class BaseModelArgs(Protocol):
    """The sizes of a model."""

    def update_from_config(self, job_config: JobConfig, tokenizer: Any) -> None:
        """Takes what the job decides, such as the sequence length."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Number of parameters, and floating point operations of a token's forward and backward."""


class ModelProtocol(Protocol):
    """What the Trainer asks of a model besides being an nn.Module."""

    @classmethod
    def from_model_args(cls, model_args: Any) -> nn.Module:
        """Built on the meta device."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Sets weights and buffers, which have memory but no values."""


def cross_entropy_loss(pred: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, seq_len, vocabulary] and labels [batch, seq_len]."""
    return nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))


def build_cross_entropy_loss(job_config: JobConfig) -> LossFunction:
    """`cross_entropy_loss`; compiled, if `compile.components` says so, but for DTensors."""
    whole = job_config.parallelism.tensor_parallel_degree == 1
    if job_config.training.compile and "loss" in job_config.compile.components and whole:
        compiled: LossFunction = torch.compile(cross_entropy_loss)
        return compiled
    return cross_entropy_loss


@dataclass
class TrainSpec:
    """A model and what builds everything around it; fields as torchtitan's.

    Attributes:
        name: `model.name` of the job.
        cls: the model, as :class:`ModelProtocol`.
        config: sizes by `model.flavor`, as :class:`BaseModelArgs`.
        parallelize_fn: from (model, world_mesh, parallel_dims, job_config) to the model.
        pipelining_fn: from (model, world_mesh, parallel_dims, job_config, device, model_args,
            parallelize_fn, loss_fn) to (schedule, model_parts, has_first_stage, has_last_stage).
        build_optimizers_fn: from (model_parts, job_config, ft_manager) to the container.
        build_lr_schedulers_fn: from (optimizers, job_config) to the container.
        build_dataloader_fn: from keywords dp_world_size, dp_rank, tokenizer and job_config to what
            yields ({"input": int64 [batch, seq_len]}, labels int64 [batch, seq_len]).
        build_tokenizer_fn: from (job_config); None: no tokenizer.
        build_loss_fn: from (job_config) to a LossFunction.
        build_metrics_processor_fn: from (job_config, parallel_dims); None: the Trainer's.
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


_train_specs: dict[str, TrainSpec] = {}


def register_train_spec(train_spec: TrainSpec) -> None:
    """Makes a model known by its name.

    Raises:
        ValueError: the name is taken.
    """
    if train_spec.name in _train_specs:
        raise ValueError(f"a TrainSpec named {train_spec.name!r} is registered already")
    _train_specs[train_spec.name] = train_spec


def get_train_spec(name: str) -> TrainSpec:
    """The TrainSpec of that name.

    Raises:
        ConfigError: there is none; names what is registered and how to register.
    """
    if name not in _train_specs:
        known = ", ".join(map(repr, sorted(_train_specs))) or "none"
        raise ConfigError(
            f"model.name is {name!r}, which is not registered (registered: {known}): give "
            "--config, such as examples/debug.toml, or call "
            "torchopt_ext.trainer.register_train_spec in a module that experimental.custom_import "
            "names"
        )
    return _train_specs[name]


def apply_to_train_specs(function: Callable[[TrainSpec], TrainSpec]) -> None:
    """Replaces every registered TrainSpec by what the function makes of it."""
    for name, spec in _train_specs.items():
        _train_specs[name] = function(spec)
