"""The Trainer: torchtitan's training loop, on any device. See docs/trainer.md."""

from torchopt_ext.trainer.checkpoint import CheckpointManager
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.data import build_dataloader, register_dataset
from torchopt_ext.trainer.load_config import load_config
from torchopt_ext.trainer.metrics import MetricsProcessor
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import parallelize
from torchopt_ext.trainer.pipeline import pipeline
from torchopt_ext.trainer.train_spec import (
    BaseModelArgs,
    ModelConverter,
    TrainSpec,
    apply_to_train_specs,
    get_train_spec,
    register_model_converter,
    register_train_spec,
)
from torchopt_ext.trainer.trainer import Trainer

__all__ = [
    "BaseModelArgs",
    "CheckpointManager",
    "ConfigError",
    "JobConfig",
    "MetricsProcessor",
    "ModelConverter",
    "ParallelDims",
    "TrainSpec",
    "Trainer",
    "apply_to_train_specs",
    "build_dataloader",
    "get_train_spec",
    "load_config",
    "parallelize",
    "pipeline",
    "register_dataset",
    "register_model_converter",
    "register_train_spec",
]
