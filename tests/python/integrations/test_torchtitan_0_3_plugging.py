"""How torchtitan 0.3 gets our containers: overrides, fields on its command line, and
use_torchopt_ext."""

import dataclasses
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
from torch import nn

from torchopt_ext.integrations import tested

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from torchopt_ext.integrations import torchtitan_0_3 as ours

MODULE = "torchopt_ext.integrations.torchtitan_0_3"


def test_overrides_keep_the_settings():
    def override(*entries):
        apply_overrides(OverrideConfig(imports=list(entries)), config)

    config = llama3_debugmodel()
    groups, warmup = config.optimizer.param_groups, config.lr_scheduler.warmup_steps
    options = {"max_grad_norm": 2.0, "state_dtype": "bfloat16"}
    override((f"{MODULE}.optimizers", options), f"{MODULE}.lr_schedulers")
    assert type(config.optimizer) is ours.OptimizersContainer.Config
    assert type(config.lr_scheduler) is ours.LRSchedulersContainer.Config
    assert config.optimizer.param_groups is groups
    assert config.lr_scheduler.warmup_steps == warmup
    assert (config.optimizer.max_grad_norm, config.optimizer.state_dtype) == (2.0, "bfloat16")
    config = llama3_debugmodel()
    with pytest.raises(ValueError, match="speed"):
        override((f"{MODULE}.optimizers", {"speed": 1}))


def test_fields_are_options_of_the_command_line(monkeypatch):
    module = types.ModuleType("my_configs")
    module.mine = lambda: ours.use_torchopt_ext(llama3_debugmodel(), skip_nonfinite=True)
    monkeypatch.setitem(sys.modules, "my_configs", module)
    config = (
        ConfigManager()
        .parse_args(
            [
                *["--module=my_configs", "--config=mine", "--optimizer.max_grad_norm=0.5"],
                *["--optimizer.track", "norms", "lost_updates", "--optimizer.master_weights=fp32"],
                *["--optimizer.state_device=cpu", "--optimizer.state_fraction=0.5"],
            ]
        )
        .optimizer
    )
    assert type(config) is ours.OptimizersContainer.Config
    assert (config.max_grad_norm, config.skip_nonfinite) == (0.5, True)
    assert (config.track, config.master_weights) == (["norms", "lost_updates"], "fp32")
    assert (config.state_device, config.state_fraction) == ("cpu", 0.5)


def test_use_torchopt_ext_joins_pipeline_stages_and_keeps_a_hook():
    called, base = [], llama3_debugmodel()
    base.model_spec.post_optimizer_build_fn = lambda *args: called.append(args)
    spec = base.model_spec
    config = ours.use_torchopt_ext(base, max_grad_norm=1.0)
    assert spec.post_optimizer_build_fn is not config.model_spec.post_optimizer_build_fn
    parts = [nn.Linear(2, 2)]
    optimizers = config.optimizer.build(model_parts=parts)
    group_of_stages = object()
    mesh = SimpleNamespace(get_group=lambda: group_of_stages)
    dims = SimpleNamespace(get_optional_mesh={"pp": mesh}.get)
    config.model_spec.post_optimizer_build_fn(optimizers, parts, dims)
    assert called == [(optimizers, parts, dims)]
    assert optimizers.optimizers[0].process_group is group_of_stages


def test_stages_are_asked_for_with_the_first_norm(monkeypatch):
    """Two ranks with plain parameters may be two stages, or two replicas under DDP."""
    config = ours.use_torchopt_ext(llama3_debugmodel(), skip_nonfinite=True)
    told, untold = (config.optimizer.build(model_parts=[nn.Linear(2, 2)]) for _ in range(2))
    without_stages = SimpleNamespace(get_optional_mesh=lambda _: None)
    config.model_spec.post_optimizer_build_fn(told, told.model_parts, without_stages)
    config = ours.use_torchopt_ext(llama3_debugmodel())
    later = config.optimizer.build(model_parts=[nn.Linear(2, 2)])
    monkeypatch.setattr(ours.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ours.dist, "get_world_size", lambda: 2)
    told.step()
    later.step()
    later.max_grad_norm = 1.0
    for container in (untold, later):
        with pytest.raises(ValueError, match="one decision of all pipeline stages"):
            container.step()


def test_use_torchopt_ext_rejects_other_containers_and_needs_the_model():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Other(stock.OptimizersContainer.Config):
        pass

    config = llama3_debugmodel()
    config.optimizer = Other()
    with pytest.raises(TypeError, match="Other is a configuration of another container"):
        ours.use_torchopt_ext(config)
    config = llama3_debugmodel()
    config.model_spec, section = None, config.optimizer
    with pytest.raises(ValueError, match="model_spec is None"):
        ours.use_torchopt_ext(config)
    assert config.optimizer is section


def test_other_versions_are_named():
    with pytest.warns(UserWarning, match=r"tested with torchtitan 0\.3\.9 and may not fit 0\.3\.0"):
        tested.warn_if_untested("torchtitan", "0.3.9")
    with warnings.catch_warnings(action="error"):
        tested.warn_if_untested("torchtitan", "0.3.0")
