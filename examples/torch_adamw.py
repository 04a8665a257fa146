"""The byte-level llama with torch's fused AdamW: how to bring an optimizer to the Trainer.

    python -m torchopt_ext train --config examples/debug.toml \
        --experimental.custom_import examples.torch_adamw --model.name byte_llama_torch_adamw

torch's optimizer does not clip in its step, so the Trainer calls clip_grad_norm_ first.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.build import common_arguments
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.train_spec import get_train_spec, register_train_spec

from . import byte_llama  # noqa: F401  registers what is changed here


def build_optimizers(
    model_parts: list[nn.Module], job_config: JobConfig, ft_manager: Any = None
) -> OptimizersContainer[torch.optim.AdamW]:
    arguments = common_arguments(job_config.optimizer) | {"fused": True}
    return OptimizersContainer(model_parts, torch.optim.AdamW, arguments)


register_train_spec(
    dataclasses.replace(
        get_train_spec("byte_llama"),
        name="byte_llama_torch_adamw",
        build_optimizers_fn=build_optimizers,
    )
)
