"""torchtitan 0.3: its Trainer builds torchopt_ext's optimizers and learning-rate schedules.

    torchrun ... -m torchtitan.train --module ... --config ... --override.imports \
        torchopt_ext.integrations.torchtitan_0_3.optimizers \
        torchopt_ext.integrations.torchtitan_0_3.lr_schedulers

or, in your own config function, `use_torchopt_ext(llama3_debugmodel())`. The import itself only
lets torchtitan's CheckpointManager load our containers' optional entries.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchopt_ext import containers
from torchopt_ext.containers.arguments import (
    own_fp32_moments,
    trainable_parameters,
    with_fp32_moments,
)
from torchopt_ext.containers.build import (
    FUSED,
    ineffective,
    read_options,
    reject_ineffective_without_norm,
)
from torchopt_ext.containers.deferred_clipping import defer_clipping
from torchopt_ext.containers.lr_schedulers import schedule_from_config
from torchopt_ext.containers.weights import fused_of
from torchopt_ext.integrations.checkpoints import patch_dcp_load
from torchopt_ext.integrations.tested import warn_if_untested
from torchopt_ext.integrations.torchtitan_clipping import take_over, watch
from torchopt_ext.optim import FusedMuon, FusedOptimizer
from torchopt_ext.optim.context import ALONE
from torchopt_ext.optim.embeddings import embeddings_among
from torchopt_ext.optim.options import configures_step
from torchopt_ext.optim.placed_states import placed_together
from torchopt_ext.state.collective import all_gather_json
from torchopt_ext.state.params import params_of
from torchopt_ext.statedict.dcp import group_of

warn_if_untested("torchtitan", "0.3.0")

from torchtitan.components import checkpointer  # noqa: E402
from torchtitan.components import optimizer as stock  # noqa: E402
from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402

from torchopt_ext.integrations.torchtitan_0_3_muon import (  # noqa: E402
    DIST_MUON,
    divided,
    keys_by_matrix,
    without_places,
)

__all__ = [
    "LRSchedulersContainer",
    "OptimizersContainer",
    "agree_over_pipeline",
    "lr_schedulers",
    "optimizers",
    "use_torchopt_ext",
]

_OURS = {cls.__name__: cls for cls in FUSED.values()} | {DIST_MUON: FusedMuon}
_BF16_STATES = "fused_opt_states_bf16"
_FUSED = ("fused", _BF16_STATES)
_Arguments: TypeAlias = dict[str, dict[str, Any]]  # by the name of the optimizer


class OptimizersContainer(containers.OptimizersContainer[Any], Configurable):  # type: ignore[misc]
    """A container with one optimizer per model part and optimizer name, over groups by patterns.

    It replaces torchtitan's class of this name (torchtitan/components/optimizer/optimizer.py), with
    its configuration. "FusedAdam", "FusedAdamW", "FusedLion", "FusedMuon" and "FusedSGD" are
    torchopt_ext's, and so is "DistMuon", a FusedMuon. "Adam", "AdamW", "Lion", "Muon" and "SGD" are
    also torchopt_ext's if the implementation is fused, which all groups of a name may override.
    Other names are torchtitan's.

    Patterns are searched for in parameter names without wrappers of modules. The first match
    decides. A pattern may match only in another pipeline stage, so all ranks must build their
    containers together.

    Args:
        config: the container's configuration.
        model_parts: the modules to train.

    Raises:
        NotImplementedError: An optimizer name is unknown.
        AssertionError: The implementation is unknown, or no pattern matches a trainable parameter.
        ValueError: A pattern matches nothing, a setting has no effect, or clipping or skipping
            could not be one decision; an optimizer rejects its arguments, or a matrix DistMuon's
            blocks; a parameter is on the meta device or in two parts.
    """

    @dataclass(kw_only=True, slots=True)
    @configures_step()
    class Config(stock.OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's fields, and FusedAdamW's arguments for all torchopt_ext optimizers.

        `optimizer_factory_kwargs_by_name` may have these arguments for the optimizers of one name.
        """

        deferred_clipping: bool = False
        """Clip to training.max_norm in the step; torchtitan reads all gradients twice more."""

        muon: dict[str, Any] | None = None
        """Step the hidden matrices of AdamW's and Adam's groups by Muon, with these keys of groups.
        {} is enough: learning rate and weight decay are those of the group."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        classes = _classes(config)
        ours = [name for name, cls in classes.items() if cls]
        arguments = _arguments_by_name(config, ours, classes)
        trainable_parameters(model_parts)  # rejects those that cannot be trained
        # A pattern may match in a stage on another rank.
        partial = dist.is_initialized() and dist.get_world_size() > 1
        for name in ours:
            reject_ineffective_without_norm(arguments[name], deferred=config.deferred_clipping)
            arguments[name] = with_fp32_moments(arguments[name], model_parts, partial=partial)
        matched, dtypes = _matched(model_parts, [group.pattern for group in config.param_groups])
        _reject_ineffective(config, {name: arguments[name] for name in ours}, dtypes)
        self.model_parts = model_parts
        keys = keys_by_matrix(config, classes, model_parts, matched)
        modules = [module for part in model_parts for module in part.modules()]
        with embeddings_among(modules), placed_together():
            by_part = [
                self._built_for_part(index, config, named, classes, arguments, keys)
                for index, named in enumerate(matched)
            ]
        self._sizes = [len(part) for part in by_part]
        self.optimizers = [optimizer for part in by_part for optimizer in part]
        _check_one_decision(self.optimizers)
        self._post_init(params_of(*self.optimizers), {})
        self._built = True
        watch(self)
        self._knows_stages = config.deferred_clipping  # clipping calls name their group
        if config.deferred_clipping:
            defer_clipping(self)
            take_over(distributed)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        """Returns the factory for a name that is not ours. May be overridden, as in torchtitan."""
        return stock.OptimizersContainer._resolve_optimizer_factory(name)

    def _built_for_part(
        self,
        index: int,
        config: Config,
        matched: list[dict[str, nn.Parameter]],
        classes: dict[str, type[FusedOptimizer] | None],
        arguments: _Arguments,
        keys: dict[nn.Parameter, dict[str, Any]],
    ) -> list[Optimizer]:
        """Builds a part's optimizers from the parameters of each of the configuration's groups."""
        stocks = stock.OptimizersContainer
        groups: dict[str, list[dict[str, Any]]] = {}
        patterns: dict[str, list[str]] = {}
        frozen = not any(matched)  # still shares norm and schedule with other stages
        of_frozen = min(classes, key=lambda name: classes[name] is None, default=None)
        for asked, named in zip(config.param_groups, matched, strict=True):
            name = asked.optimizer_name
            if not named and not (frozen and name == of_frozen):
                continue
            if cls := classes[name]:
                made = divided(config, asked, cls, named, keys)
            else:
                params = {"params": list(named.values()), "param_names": list(named)}
                made = [params | stocks._build_impl_kwargs(config) | asked.optimizer_kwargs]
            groups.setdefault(name, []).extend(made)
            patterns.setdefault(name, []).extend([asked.pattern] * len(made))
        optimizers = []
        for name, of_name in groups.items():
            factory: Callable[..., Optimizer] = classes[name] or self._resolve_optimizer_factory(
                name
            )
            stepped = [param for group in of_name for param in group["params"]]
            optimizers.append(factory(of_name, **own_fp32_moments(arguments[name], stepped)))
            stocks._log_optimizer(self, optimizers[-1], index, patterns[name])
        return optimizers

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._knows_stages:
            self._knows_stages = _check_stages(self.optimizers)
        return super().step(*args, **kwargs)


class LRSchedulersContainer(containers.LRSchedulersContainer, Configurable):  # type: ignore[misc]
    """The schedules of an :class:`OptimizersContainer`, with torchtitan's configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.LRSchedulersContainer.Config):  # type: ignore[misc]
        """torchtitan's fields, and the choice of the formula."""

        compat: Literal["torchtitan"] | None = None
        """Use "torchtitan" for the rates of torchtitan before 0.1, if the job began with them."""

        def build(
            self, *, optimizers: containers.OptimizersContainer[Any], training_steps: int
        ) -> "LRSchedulersContainer":
            return LRSchedulersContainer(optimizers, schedule_from_config(self, training_steps))

    def state_dict(self) -> dict[str, Any]:
        """Returns `{"last_epoch": n}`. Checkpoints of torchtitan 0.3 would lack other keys."""
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after `last_epoch` steps, whichever version of torchtitan saved it.

        Everything else follows from the current configuration, because torchtitan 0.2 saves one
        scheduler's values, and schedulers may have other groups here.
        """
        super().load_state_dict({"last_epoch": state_dict["last_epoch"]})


@override(target=stock.OptimizersContainer.Config, exact=True, description="torchopt_ext")
def optimizers(config: Any, **fields: Any) -> OptimizersContainer.Config:
    """Replaces torchtitan's optimizers by ours, with its settings and `fields` of our `Config`."""
    return derive(config, OptimizersContainer.Config, **fields)


@override(target=stock.LRSchedulersContainer.Config, exact=True, description="torchopt_ext")
def lr_schedulers(config: Any, **fields: Any) -> LRSchedulersContainer.Config:
    """Replaces torchtitan's schedules by ours, with its settings and `fields` of our `Config`."""
    return derive(config, LRSchedulersContainer.Config, **fields)


def use_torchopt_ext(config: Any, **fields: Any) -> Any:
    """Puts torchopt_ext's optimizers and schedules into a Trainer.Config, and returns the Config.

    All pipeline stages then clip and skip in the step by one decision.

    Args:
        config: a Trainer.Config; changed in place.
        fields: fields of :class:`OptimizersContainer.Config`.

    Raises:
        TypeError: The optimizer or scheduler section belongs to another class of containers.
        ValueError: A field is unknown, or the Config has no model yet. No error changes anything.
    """
    return put_into(config, OptimizersContainer, stock.OptimizersContainer, fields)


def check_section(section: Any, *known: Any) -> None:
    """Raises TypeError unless a section is the configuration of one of these containers."""
    if type(section) not in [container.Config for container in known]:
        raise TypeError(f"{type(section).__qualname__} is a configuration of another container")


def put_into(config: Any, ours: Any, theirs: Any, fields: dict[str, Any]) -> Any:
    """Does :func:`use_torchopt_ext` with a class of our containers in place of one of theirs."""
    check_section(config.optimizer, theirs, ours)
    check_section(config.lr_scheduler, stock.LRSchedulersContainer, LRSchedulersContainer)
    if config.model_spec is None:
        raise ValueError("model_spec is None: set it first, as its hook joins pipeline stages")
    config.optimizer = derive(config.optimizer, ours.Config, **fields)
    config.lr_scheduler = lr_schedulers(config.lr_scheduler)
    own_hook = config.model_spec.post_optimizer_build_fn

    def post_optimizer_build(*args: Any) -> None:
        agree_over_pipeline(*args)
        if own_hook is not None:
            own_hook(*args)

    config.model_spec = dataclasses.replace(
        config.model_spec, post_optimizer_build_fn=post_optimizer_build
    )
    return config


def agree_over_pipeline(
    optimizers: OptimizersContainer, model_parts: Sequence[nn.Module], parallel_dims: Any
) -> None:
    """Lets pipeline stages decide together, as a ModelSpec's `post_optimizer_build_fn`."""
    optimizers._knows_stages = True  # also that there are none
    if (mesh := parallel_dims.get_optional_mesh("pp")) is not None:
        for optimizer in fused_of(optimizers.optimizers):
            optimizer.process_group = mesh.get_group()


patch_dcp_load(checkpointer)


def _classes(config: Any) -> dict[str, type[FusedOptimizer] | None]:
    """Returns our class for each optimizer name of the groups, or None if it is torchtitan's.

    Raises:
        AssertionError: The implementation is unknown.
        ValueError: A name such as "AdamW" would be fused for some groups only.
    """
    known = (*_FUSED, "foreach", "for-loop")
    if config.implementation not in known:
        raise AssertionError(f"implementation is {config.implementation!r}, expected {known}")
    asked: dict[str, list[bool]] = {}  # whether each group of a name is fused
    for group in config.param_groups:
        fused = group.optimizer_kwargs.get("fused") is not False
        asked.setdefault(group.optimizer_name, []).append(fused)
    classes = {}
    for name, groups in asked.items():
        is_ours = name in FUSED and config.implementation in _FUSED
        if is_ours and not all(groups):
            field = f"optimizer_kwargs['fused'] is False in param_groups of {name!r}"
            if any(groups):
                raise ValueError(
                    f"{field}, but not in all of them: set it in all, or give those that "
                    f"torchopt_ext is to step the optimizer_name 'Fused{name}'"
                )
            if config.implementation == _BF16_STATES:
                raise ValueError(f"{field}, but implementation {_BF16_STATES!r} needs a fused step")
        classes[name] = _OURS.get(name) or (FUSED[name] if is_ours and all(groups) else None)
    return classes


def _arguments_by_name(config: Any, ours: Sequence[str], names: Collection[str]) -> _Arguments:
    """Returns the optimizers' arguments except groups. Rejects what concerns no optimizer."""
    by_name = config.optimizer_factory_kwargs_by_name
    if unused := by_name.keys() - names:
        raise ValueError(
            f"optimizer_factory_kwargs_by_name has {sorted(unused)}, but the param_groups name "
            f"{list(names)} only"
        )
    options = read_options(config)
    if config.implementation == _BF16_STATES:
        options = {"state_dtype": torch.bfloat16} | options
        if options["state_dtype"] != torch.bfloat16:
            raise ValueError(f"implementation {_BF16_STATES!r} contradicts {config.state_dtype=}")
    if options and not ours:
        raise ValueError(
            f"{sorted(options)} would have no effect: the param_groups name {list(names)} with "
            f"implementation {config.implementation!r}, none of which is one of {', '.join(_OURS)}"
        )
    fused = {*_OURS} - {DIST_MUON}  # whose recipes name another implementation
    if names and fused >= set(names) and config.implementation not in _FUSED:
        raise ValueError(
            f"implementation {config.implementation!r} would have no effect on {list(names)}"
        )
    arguments = {name: without_places(name, by_name.get(name, {})) for name in names}
    # Keeps what read_options leaves out: arguments like amsgrad, and a threshold of 0.
    return arguments | {n: arguments[n] | read_options(options | arguments[n]) for n in ours}


def _reject_ineffective(
    config: Any, arguments: _Arguments, dtypes: Sequence[set[torch.dtype]]
) -> None:
    """Raises ValueError if an argument has no effect on any of the optimizers that it is for.

    Args:
        arguments: our optimizers' arguments by name.
        dtypes: of each group's parameters, the same on all ranks, which then raise together.
    """
    by_name: dict[str, set[torch.dtype]] = {}
    for group, of_group in zip(config.param_groups, dtypes, strict=True):
        by_name.setdefault(group.optimizer_name, set()).update(of_group)
    messages = {name: ineffective(arguments[name], by_name[name]) for name in arguments}
    by_factory = config.optimizer_factory_kwargs_by_name
    for name in messages:
        for option, message in messages[name].items():
            # A field is for the optimizers of all names that do not have their own value.
            shared = [n for n in messages if option not in by_factory.get(n, {})]
            names = shared if name in shared else [name]
            if all(option in messages[n] for n in names):
                raise ValueError(f"{', '.join(names)}: {message}")


def _matched(
    model_parts: Sequence[nn.Module], patterns: Sequence[str]
) -> tuple[list[list[dict[str, nn.Parameter]]], list[set[torch.dtype]]]:
    """Returns each part's trainable parameters by name, grouped by the first matching pattern.

    It also returns the dtypes of each group's parameters in all parts on all ranks. With several
    ranks, which may hold other pipeline stages, all ranks must call it.
    """
    compiled = [re.compile(pattern) for pattern in patterns]
    matched: list[list[dict[str, nn.Parameter]]] = []
    uncovered = []
    for part in model_parts:
        groups: list[dict[str, nn.Parameter]] = [{} for _ in patterns]
        for wrapped, param in part.named_parameters():
            name = canonical_fqn(wrapped)
            if not param.requires_grad:
                continue
            first = next((i for i, p in enumerate(compiled) if p.search(name)), None)
            if first is None:
                uncovered.append(name)
            else:
                groups[first][name] = param
        matched.append(groups)
    dtypes = _dtypes_everywhere(
        [
            {param.dtype for part in matched for param in part[i].values()}
            for i in range(len(patterns))
        ]
    )
    if missing := [pattern for pattern, each in zip(patterns, dtypes, strict=True) if not each]:
        raise ValueError(
            f"param_groups patterns match no trainable parameter, or only parameters of patterns "
            f"before them: {missing}"
        )
    if uncovered:
        raise AssertionError(f"no pattern of param_groups matches {uncovered}")
    return matched, dtypes


def _dtypes_everywhere(here: list[set[torch.dtype]]) -> list[set[torch.dtype]]:
    """Returns the dtypes that each group's parameters have here or on another rank."""
    names = [[str(dtype).removeprefix("torch.") for dtype in dtypes] for dtypes in here]
    ranks = all_gather_json(names, group_of(None), "comparing the parameters' dtypes")
    return [{getattr(torch, name) for rank in ranks for name in rank[i]} for i in range(len(here))]


def _check_one_decision(optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError if a norm or a skipped step would concern only some parameters."""
    ours = fused_of(optimizers)
    if not any(optimizer._wants_norm(ALONE) for optimizer in ours):
        return
    asked = {(optimizer.max_grad_norm, optimizer.skip_nonfinite) for optimizer in ours}
    if len(asked) > 1 or len(ours) < len(optimizers):
        raise ValueError(
            "max_grad_norm and skip_nonfinite are one decision over all parameters, but the "
            f"optimizers are {[type(o).__name__ for o in optimizers]}, and those of "
            f"torchopt_ext have (max_grad_norm, skip_nonfinite) {sorted(asked, key=str)}"
        )


def _check_stages(optimizers: Sequence[Optimizer]) -> bool:
    """Raises ValueError if pipeline stages would decide separately.

    torchtitan builds optimizers without saying whether there are other stages. The parameters'
    meshes span all ranks of their stage.

    Returns:
        Whether there was a decision to make. Otherwise later steps may ask for one.
    """
    alone = [o for o in fused_of(optimizers) if o.process_group is None]
    if not any(optimizer._wants_norm(ALONE) for optimizer in alone) or not dist.is_initialized():
        return False
    spans = [p.device_mesh.size() for p in params_of(*alone) if isinstance(p, DTensor)]
    if max(spans, default=1) < dist.get_world_size():
        raise ValueError(
            "max_grad_norm and skip_nonfinite need one decision of all pipeline stages, which the "
            "optimizers do not know: let use_torchopt_ext prepare the configuration, call "
            "agree_over_pipeline in the ModelSpec's post_optimizer_build_fn, or set "
            "deferred_clipping, without max_grad_norm"
        )
    return True
