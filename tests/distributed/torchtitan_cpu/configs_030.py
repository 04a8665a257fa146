"""Configurations for torchtitan 0.3's `--module configs_030 --config NAME`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def small() -> Trainer.Config:
    """The llama3 debug model, small enough for a CPU."""
    return _for_cpu(llama3_debugmodel())


def fault_tolerant() -> Trainer.Config:
    """`small` for the Trainer with torchft, with a quorum in every step."""
    from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel

    config = _for_cpu(llama3_torchft_debugmodel())
    config.fault_tolerance.semi_sync_method = None
    config.fault_tolerance.process_group = "gloo"
    config.profiler.enable_profiling = False
    return config


def fault_tolerant_ours() -> Trainer.Config:
    from torchopt_ext.integrations.torchtitan_0_3_torchft import use_torchopt_ext

    return use_torchopt_ext(fault_tolerant())


def moe() -> Trainer.Config:
    """The deepseek_v3 debug model: a dense layer, and a layer with balanced experts."""
    return _for_cpu(deepseek_v3_debugmodel())


def _for_cpu(config: Trainer.Config) -> Trainer.Config:
    """Reduces a config to two layers and an attention that runs on a CPU."""
    spec = config.model_spec
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        # The default, flex attention, has no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return config


class SameData(HuggingFaceTextDataLoader):
    """Gives all ranks the same data: the mean gradient is then that of one process."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **(arguments | {"dp_world_size": 1, "dp_rank": 0}))


def same_data() -> Trainer.Config:
    config = small()
    config.dataloader = SameData.Config(dataset=config.dataloader.dataset)
    return config


def dist_muon() -> Trainer.Config:
    """Two groups of DistMuon, which takes one, and neither tensor nor pipeline parallelism."""
    config = same_data()
    (whole,) = config.optimizer.param_groups
    kept = {k: v for k, v in whole.optimizer_kwargs.items() if k in ("lr", "weight_decay")}
    patterns = {r"attention\..*w.*\.weight$": 0.95, r"feed_forward\.w[123]\.weight$": 0.9}
    config.optimizer.param_groups[:0] = [
        replace(
            whole,
            pattern=pattern,
            optimizer_name="DistMuon",
            optimizer_kwargs={**kept, "momentum": momentum, "adjust_lr_fn": "match_rms_adamw"},
        )
        for pattern, momentum in patterns.items()
    ]
    return config


def kimi() -> Trainer.Config:
    """The Kimi debug model with the optimizers of its recipe, on text."""
    for name in ("mm_datasets", "utils.image"):  # need torchvision
        sys.modules.setdefault(f"torchtitan.hf_datasets.multimodal.{name}", MagicMock())
    from torchtitan.models.kimi_k2_7.config_registry import kimi_k2_5_debugmodel

    config, text = _for_cpu(kimi_k2_5_debugmodel()), same_data()
    config.dataloader, config.tokenizer = text.dataloader, text.tokenizer
    return config


def embeddings_apart() -> Trainer.Config:
    """`small` with a group of embeddings, which only the first pipeline stage has."""
    config = small()
    (whole,) = config.optimizer.param_groups
    config.optimizer.param_groups.insert(0, replace(whole, pattern="tok_embeddings"))
    return config


def clipping_in_step() -> Trainer.Config:
    """`small` with our containers, which clip to 1 within the step; the Trainer does not clip."""
    from torchopt_ext.integrations.torchtitan_0_3 import use_torchopt_ext

    config = use_torchopt_ext(small(), max_grad_norm=1.0)
    config.training.max_norm = math.inf
    return config


def bf16() -> Trainer.Config:
    config = small()
    config.training.dtype = "bfloat16"
    return config


def diverging() -> Trainer.Config:
    config = small()
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e38
    return config


def groups() -> Trainer.Config:
    """`small` with two optimizers. AdamW has two groups."""
    config = small()
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    config.optimizer.param_groups = [
        ParamGroupConfig(
            pattern="norm",
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0},
        ),
        ParamGroupConfig(
            pattern="tok_embeddings|lm_head",
            optimizer_name="Adam",
            optimizer_kwargs={"lr": 2e-3, "betas": (0.8, 0.9)},
        ),
        ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4, **options}
        ),
    ]
    return config
