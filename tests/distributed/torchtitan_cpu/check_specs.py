"""Asserts which builders torchtitan's models get after an import of the integration."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cpu_shim
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

cpu_shim.install()

from torchtitan.components import checkpoint  # noqa: E402
from torchtitan.components import optimizer as stock  # noqa: E402
from torchtitan.config import ConfigManager, LRScheduler, Optimizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models import llama3  # noqa: E402  (before the integration: holds stock builders)
from torchtitan.protocols import train_spec  # noqa: E402

from torchopt_ext import containers  # noqa: E402
from torchopt_ext.integrations import torchtitan_0_2  # noqa: E402
from torchopt_ext.integrations.tested import warn_if_untested  # noqa: E402

stock_clip_grad_norm_ = dist_utils.clip_grad_norm_

ONE_PROCESS = SimpleNamespace(
    ep_enabled=False, pp_enabled=False, get_optional_mesh=lambda name: None
)


class MoEModel(nn.Module):
    """The parts of a mixture-of-experts model that torchtitan's load balancing reads."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(2, 2)
        block.moe_enabled = True
        block.moe = nn.Module()
        block.moe.load_balance_coeff = 0.5
        block.moe.register_buffer("tokens_per_expert", torch.tensor([3.0, 1.0]))
        block.moe.register_buffer("expert_bias", torch.zeros(2))
        self.layers = nn.ModuleDict({"0": block})


def check_dense() -> None:
    assert llama3.get_train_spec().build_optimizers_fn is not containers.build_optimizers
    spec = train_spec.get_train_spec("llama3")
    optimizers = spec.build_optimizers_fn([nn.Linear(2, 2)], Optimizer(), ONE_PROCESS)
    schedules = spec.build_lr_schedulers_fn(optimizers, LRScheduler(warmup_steps=2), 10)
    assert type(optimizers) is containers.OptimizersContainer
    assert type(schedules) is containers.LRSchedulersContainer
    assert spec.build_dataloader_fn is llama3.get_train_spec().build_dataloader_fn


def check_mixture_of_experts() -> None:
    model = MoEModel()
    builder = train_spec.get_train_spec("deepseek_v3").build_optimizers_fn
    optimizers = builder([model], Optimizer(), ONE_PROCESS)
    assert type(optimizers) is containers.OptimizersContainer
    block = model.layers["0"]
    before = block.weight.detach().clone()
    block(torch.ones(1, 2)).sum().backward()
    optimizers.step()
    assert not torch.equal(block.weight, before)
    # The hook ran once: biases move by coeff against the load, and the counters start again.
    assert block.moe.expert_bias.tolist() == [-0.5, 0.5]
    assert block.moe.tokens_per_expert.tolist() == [0.0, 0.0]


def check_builders_of_ones_own() -> None:
    own = mock.Mock(spec=stock.build_optimizers, name="own")
    spec = dataclasses.replace(llama3.get_train_spec(), build_optimizers_fn=own)
    train_spec.register_train_spec("mine", spec)
    logger = logging.getLogger(torchtitan_0_2.__name__)
    with mock.patch.object(logger, "warning") as warning:
        found = train_spec.get_train_spec("mine")
    assert found.build_optimizers_fn is own
    assert found.build_lr_schedulers_fn is containers.build_lr_schedulers
    warning.assert_called_once()


def check_names_of_ones_own() -> None:
    spec = train_spec.get_train_spec("llama3_torchopt_ext")
    assert spec == train_spec.get_train_spec("llama3")
    for name in ("llama9_torchopt_ext", "llama9"):
        with pytest.raises(ValueError, match="llama9 is not registered"):
            train_spec.get_train_spec(name)


OPTIONS = {
    "skip_nonfinite": True,
    "master_weights": "remainder",
    "state_dtype": "bfloat16",
    "stochastic_rounding": True,
    "rounding_seed": 7,
    "write_back_gradients": True,
    "track": ["norms", "lost_updates"],
    "amsgrad": True,
    "maximize": True,
}


def check_every_option(in_file: bool) -> None:
    """Sets all options of docs/torchtitan_0_2.md, by the command line or by a file."""
    arguments = [f"--job.custom_config_module={torchtitan_0_2.__name__}"]
    lines = ["[optimizer]"]
    for name, value in (OPTIONS | {"deferred_clipping": True}).items():
        text = ",".join(value) if isinstance(value, list) else str(value)
        arguments.append(f"--optimizer.{name}" + ("" if value is True else f"={text}"))
        lines.append(f"{name} = {json.dumps(value)}")
    if in_file:
        Path("job.toml").write_text("\n".join(lines))
        arguments = [arguments[0], "--job.config_file=job.toml"]
    config = ConfigManager().parse_args(arguments).optimizer
    assert isinstance(config, Optimizer)  # torchtitan's own fields are there as well
    found = dataclasses.asdict(config)
    assert {name: found[name] for name in OPTIONS} == OPTIONS
    ours = {field.name for field in dataclasses.fields(torchtitan_0_2.Optimizer)}
    assert ours - OPTIONS.keys() == {
        *("deferred_clipping", "max_grad_norm", "backwards_per_step", "compat", "fp32_moments"),
        *("no_decay", "lr_multipliers", "cautious_weight_decay", "decay_follows_lr"),
        *("muon", "adamw", "adjust_lr_fn", "ns_coefficients", "ns_steps"),
        *("momentum", "dampening", "nesterov", "state_device", "state_fraction"),
        "offload_step",
    }
    model = nn.Linear(2, 2).bfloat16()
    builder = train_spec.get_train_spec("llama3").build_optimizers_fn
    optimizers = builder([model], config, ONE_PROCESS)
    assert dist_utils.clip_grad_norm_ is not stock_clip_grad_norm_
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    norm = dist_utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizers.step()
    assert norm == 6**0.5  # three columns of ones, two rows
    gradient = 0.5 / norm.item()  # written back
    assert abs(model.bias.grad[0].item() - gradient) < 1e-2 * gradient
    state = optimizers.state[model.weight]
    assert {"remainder", "max_exp_avg_sq"} <= state.keys()
    assert state["exp_avg"].dtype == torch.bfloat16
    (optimizer,) = optimizers
    assert optimizer.telemetry.grad_norms.any()


def check_fp32_moments() -> None:
    module = f"--job.custom_config_module={torchtitan_0_2.__name__}"
    builder = train_spec.get_train_spec("llama3").build_optimizers_fn
    for options, expected in (((), torch.float32), (("--optimizer.fp32_moments=^x",), torch.int8)):
        arguments = [module, "--optimizer.state_dtype=int8", *options]
        model = nn.Sequential(nn.Embedding(4, 64))
        model.register_parameter("x", nn.Parameter(torch.ones(2, 64)))
        optimizers = builder([model], ConfigManager().parse_args(arguments).optimizer, ONE_PROCESS)
        (model(torch.tensor([1])).sum() + model.x.sum()).backward()
        optimizers.step()
        state = optimizers.state[model[0].weight]
        assert state.get("exp_avg", state.get("exp_avg_codes")).dtype == expected


def check_an_option_without_effect() -> None:
    builder = train_spec.get_train_spec("llama3").build_optimizers_fn
    for options, message in {
        ("--optimizer.master_weights=fp32",): "master_weights has no effect",
        ("--optimizer.deferred_clipping", "--optimizer.implementation=foreach"): "needs",
        ("--optimizer.rounding_seed=1",): "rounding_seed has no effect",
        ("--optimizer.write_back_gradients",): "write_back_gradients has no effect",
        ("--optimizer.backwards_per_step=2",): "backwards_per_step has no effect",
        ("--optimizer.compat=torchtitan",): "compat of the optimizer section has no effect",
    }.items():
        module = f"--job.custom_config_module={torchtitan_0_2.__name__}"
        config = ConfigManager().parse_args([module, *options]).optimizer
        with pytest.raises(ValueError, match=message):
            builder([nn.Linear(2, 2)], config, ONE_PROCESS)


def check_compat() -> None:
    arguments = ["--lr_scheduler.compat=torchtitan", "--lr_scheduler.warmup_steps=2"]
    module = f"--job.custom_config_module={torchtitan_0_2.__name__}"
    config = ConfigManager().parse_args([module, *arguments])
    spec = train_spec.get_train_spec("llama3")
    optimizers = spec.build_optimizers_fn([nn.Linear(2, 2)], config.optimizer, ONE_PROCESS)
    schedules = spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, 10)
    assert schedules.schedulers[0].get_last_lr() == [pytest.approx(config.optimizer.lr / 3)]


def check_a_checkpoint_that_does_not_fit() -> None:
    builder = train_spec.get_train_spec("llama3").build_optimizers_fn
    saved = builder([nn.Sequential(nn.Linear(2, 2))], Optimizer(), ONE_PROCESS)
    dcp.save({"optimizer": saved}, checkpoint_id="saved")
    manager = SimpleNamespace(states={})
    for model, cut, error, message in (
        (nn.Linear(2, 2), False, KeyError, "'state.weight.step' is missing"),
        (nn.Sequential(nn.Linear(3, 2)), False, ValueError, r"has shape \(2, 2\), expected \(2, 3"),
        (nn.Sequential(nn.Linear(2, 2)), True, RuntimeError, "reading the optimizer state: rank 0"),
    ):
        if cut:
            Path("saved/__0_0.distcp").unlink()
        optimizers = builder([model], Optimizer(lr=0.5), ONE_PROCESS)
        with pytest.raises(error, match=message):
            checkpoint.CheckpointManager.dcp_load(
                manager, {"optimizer": optimizers}, "saved", False, False
            )
        assert not any(
            value.any() for key, value in optimizers.state_dict().items() if "exp" in key
        )
        assert optimizers.param_groups[0]["lr"] == 0.5


def check_clipping_stays_torchtitans() -> None:
    builder = train_spec.get_train_spec("llama3").build_optimizers_fn
    builder([nn.Linear(2, 2)], Optimizer(), ONE_PROCESS)
    assert dist_utils.clip_grad_norm_ is stock_clip_grad_norm_


def check_versions() -> None:
    with pytest.warns(UserWarning, match=r"tested with torchtitan 0\.2\.1 and may not fit 0\.2\.2"):
        warn_if_untested("torchtitan", "0.2.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(torchtitan_0_2)


if __name__ == "__main__":
    check_clipping_stays_torchtitans()
    check_names_of_ones_own()
    check_every_option(in_file=False)
    check_every_option(in_file=True)
    check_fp32_moments()
    check_an_option_without_effect()
    check_compat()
    check_a_checkpoint_that_does_not_fit()
    check_dense()
    check_mixture_of_experts()
    check_builders_of_ones_own()
    check_versions()
