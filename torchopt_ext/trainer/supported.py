"""Rejects settings that the Trainer cannot honor."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.load_config import checked, describe, settings_of

_NO_EXPERTS = "there is no expert parallelism"
_NO_SEMI_SYNC = "replica groups synchronize in every step"
_NO_HF = "models have no conversion from and to Hugging Face's names"
_NO_BUDGET = "activations are recomputed by layer or operator"

_UNSUPPORTED = {
    "parallelism.enable_async_tensor_parallel": "tensor parallel communication is not overlapped",
    "parallelism.module_fqns_per_model_part": "use pipeline_parallel_split_points",
    "parallelism.pipeline_parallel_schedule_csv": "use a schedule of torch's by its name",
    "parallelism.context_parallel_load_balancer": "sequences are divided as torch does",
    "parallelism.expert_parallel_degree": _NO_EXPERTS,
    "parallelism.expert_tensor_parallel_degree": _NO_EXPERTS,
    "parallelism.expert_parallel_comm_backend": _NO_EXPERTS,
    "checkpoint.enable_ft_dataloader_checkpoints": "the data's position is saved with the rest",
    "checkpoint.initial_load_in_hf": _NO_HF,
    "checkpoint.initial_load_in_hf_quantized": _NO_HF,
    "checkpoint.last_save_in_hf": f"{_NO_HF}; export_safetensors keeps the model's own",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _NO_EXPERTS,
    "activation_checkpoint.memory_budget": _NO_BUDGET,
    "activation_checkpoint.visualize_memory_budget_pareto": _NO_BUDGET,
    "compile.backend": "torch.compile uses inductor",
    "comm.mode": "ranks communicate",
    "memory_estimation.enabled": "memory is measured, in metrics",
    "memory_estimation.disable_fake_mode": "memory is measured, in metrics",
    "fault_tolerance.semi_sync_method": _NO_SEMI_SYNC,
    "fault_tolerance.sync_steps": _NO_SEMI_SYNC,
    "fault_tolerance.should_quantize": _NO_SEMI_SYNC,
    "fault_tolerance.fragment_sync_delay": _NO_SEMI_SYNC,
    "fault_tolerance.fragment_update_alpha": _NO_SEMI_SYNC,
    "debug.deterministic_warn_only": "training.deterministic rejects what is not deterministic",
    "debug.moe_force_load_balance": _NO_EXPERTS,
}
"""Settings of torchtitan that must keep their defaults, and the reasons."""


def check_supported(job_config: JobConfig) -> None:
    """Rejects settings that the Trainer cannot honor.

    Raises:
        ConfigError: A setting is not supported or out of range. The message names all of them.
    """
    default = JobConfig()
    wrong = [
        f"{name} is {_get(job_config, name)!r}, but {why}"
        for name, why in _UNSUPPORTED.items()
        # None and "" both mean "not set"
        if (_get(job_config, name) or None) != (_get(default, name) or None)
    ]
    if wrong:
        raise ConfigError(f"settings that this Trainer does not support: {'; '.join(wrong)}")
    wrong = [*_out_of_range(job_config, default)]
    if not 0 <= job_config.lr_scheduler.lr_min <= 1:
        wrong.append(f"lr_scheduler.lr_min is {job_config.lr_scheduler.lr_min}, expected 0 to 1")
    for name, kind in settings_of(type(job_config)).items():
        if "Literal" in str(kind):
            try:
                checked(kind, value := _get(job_config, name))
            except TypeError:
                wrong.append(f"{name} is {value!r}, expected {describe(kind)}")
    if not job_config.training.max_norm > 0:
        wrong.append(
            f"training.max_norm is {job_config.training.max_norm}, expected a positive number, or "
            "inf to measure only"
        )
    checkpoint, unset = job_config.checkpoint, (-1, None, False, "")
    for name in ("load_step", "initial_load_path", "create_seed_checkpoint", "export_safetensors"):
        if not checkpoint.enable_checkpoint and getattr(checkpoint, name) not in unset:
            wrong.append(f"checkpoint.{name} needs checkpoint.enable_checkpoint, which is false")
    for name in ("checkpoint.load_only", "fault_tolerance.enable"):
        if checkpoint.create_seed_checkpoint and _get(job_config, name):
            wrong.append(f"checkpoint.create_seed_checkpoint writes nothing with {name}")
    if job_config.activation_checkpoint.mode == "memory_budget":
        wrong.append(f"activation_checkpoint.mode is 'memory_budget', but {_NO_BUDGET}")
    compiled = job_config.compile.components
    if job_config.training.compile and "model" not in compiled:
        wrong.append(f"compile.components is {compiled}, expected 'model' among them")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _out_of_range(config: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """Describes numbers outside the bounds of JobConfig's fields, also where a field is replaced.

    Numbers must also be finite. None, for a default, is allowed.
    """
    for field in fields(default):
        name, number = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(inner := getattr(default, field.name)):
            yield from _out_of_range(number, inner, f"{name}.")
        elif number is not None and (bounds := field.metadata.get("bounds")):
            least, end = bounds
            if not least <= number < end:
                also = f" and less than {end}" if end < math.inf else ""
                yield f"{name} is {number}, expected a number of {least} or more{also}"


def _get(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config)
