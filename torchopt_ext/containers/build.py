"""build_optimizers: builds a container from a configuration like torchtitan's up to 0.2."""

import logging
from collections.abc import Iterable, Mapping, Set
from functools import partial
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from torchopt_ext.containers.deferred_clipping import defer_clipping
from torchopt_ext.containers.fault_tolerant import FTOptimizersContainer
from torchopt_ext.containers.in_backward import OptimizersInBackwardContainer
from torchopt_ext.containers.optimizers import OptimizersContainer
from torchopt_ext.optim import FusedAdam, FusedAdamW, FusedLion, FusedMuon, FusedOptimizer, FusedSGD
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, is_8_bit
from torchopt_ext.optim.options import ASK_FOR_NORM, CONFIGURED, DECAY, DEFAULTS, without_host
from torchopt_ext.state.algorithms import ADAM, ALGORITHMS, algorithm_of
from torchopt_ext.state.storage import SIXTEEN_BIT

__all__ = ["build_optimizers", "common_arguments"]

logger = logging.getLogger(__name__)

FUSED: dict[str, type[FusedOptimizer]] = {
    cls.__name__.removeprefix("Fused"): cls
    for cls in (FusedAdam, FusedAdamW, FusedLion, FusedMuon, FusedSGD)
}
_TORCH: dict[str, type[Optimizer]] = {
    name: getattr(torch.optim, name) for name in ("Adam", "AdamW", "SGD")
}
_PRESET = {"lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
"""The defaults of torchtitan's section, which are for Adam. Other algorithms have their own."""
_OF_ADAMW = ("beta1", "beta2", "eps")
"""Hyperparameters of AdamW's groups beside Muon's."""
_MATRICES = {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "jordan", "ns_steps": 5}
"""Settings of Muon in configurations, and their defaults there."""
_CONFIGURATIONS = {"job_config", "optimizer_config", "parallel_dims", "ft_manager"}
_UNCONFIGURED = ("decoupled_weight_decay", "bias_correction")


@overload
def build_optimizers(
    model_parts: list[nn.Module],
    job_config: Any,
    ft_manager: Any = None,
    *,
    process_group: Any = None,
) -> OptimizersContainer[Any]: ...
@overload
def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Any,
    parallel_dims: Any,
    ft_manager: Any = None,
    *,
    process_group: Any = None,
) -> OptimizersContainer[Any]: ...
def build_optimizers(
    model_parts: list[nn.Module], *args: Any, process_group: Any = None, **kwargs: Any
) -> OptimizersContainer[Any]:
    """Builds a container with the optimizers that a configuration describes.

    Accepts `(model_parts, job_config, ft_manager)`, as torchtitan before 0.2, or `(model_parts,
    optimizer_config, parallel_dims, ft_manager=None)`, as torchtitan 0.2. A configuration with an
    attribute `optimizer` is a job configuration. Any objects can serve. The optimizer's section has
    the attributes

    - `name`: "Adam", "AdamW", "Lion", "Muon" or "SGD".
    - `implementation`: "fused" for this package's classes, "foreach" or "for-loop" for torch's
      Adam, AdamW and SGD.
    - `lr` and `eps`, as torch's.
    - `early_step_in_backward`: builds an OptimizersInBackwardContainer.
    - Optional: `beta1`, `beta2` and `weight_decay`, by default 0.9, 0.95 and 0.1 for Adam and
      AdamW; `momentum`, `dampening` and `nesterov`, for the algorithms that have them.
    - Optional: `muon` and `adamw`, patterns that send parameters to Muon or to AdamW;
      `adjust_lr_fn` (by default "match_rms_adamw"), `ns_coefficients` and `ns_steps`, Muon's.
    - Optional: options of a step, `deferred_clipping` and the others of docs/torchtitan_0_2.md.

    Args:
        process_group: ranks that share the norm and the skip decision, as in FusedAdamW. With
            pipeline stages, the default is the group of the "pp" mesh.

    Raises:
        NotImplementedError: the name is unknown, or early step in backward is combined with
            pipeline or expert parallelism.
        AssertionError: the implementation is unknown.
        ValueError: early step in backward is combined with fault tolerance; a setting would have no
            effect, such as an argument of FusedAdamW with torch's implementations, or a
            hyperparameter of another algorithm; the group for a norm over pipeline stages is
            unknown; or no parameter is trainable. In a pipeline, checks of parameters are skipped,
            because other stages have parameters, too.
    """
    if unknown := sorted(kwargs.keys() - _CONFIGURATIONS):
        raise TypeError(
            f"build_optimizers() got an unexpected keyword argument {unknown[0]!r}: options of a "
            f"step are attributes of the configuration's optimizer section"
        )
    first = args[0] if args else kwargs.get("job_config", kwargs.get("optimizer_config"))
    read = _of_job_config if hasattr(first, "optimizer") else _of_optimizer_config
    config, dims, ft_manager = read(*args, **kwargs)
    in_backward, fused = config.early_step_in_backward, config.implementation == "fused"
    if config.implementation not in ("fused", "foreach", "for-loop"):
        raise AssertionError(
            f"implementation is {config.implementation!r}, "
            "expected 'fused', 'foreach' or 'for-loop'"
        )
    classes: Mapping[str, type[Optimizer]] = FUSED if fused else _TORCH
    if config.name not in classes:
        *others, last = classes
        raise NotImplementedError(
            f"Optimizer {config.name} is not available: use {', '.join(others)} or {last}."
        )
    fault_tolerant = ft_manager is not None and ft_manager.enabled
    if in_backward and fault_tolerant:
        raise ValueError(
            "Fault tolerance is not supported with optimizers in backward: they have made the "
            "update when the replica groups decide whether to commit it."
        )
    if in_backward and (dims.ep_enabled or dims.pp_enabled):
        kind = "expert" if dims.ep_enabled else "pipeline"
        raise NotImplementedError(
            f"Optimizers in backward are not supported with {kind} parallelism."
        )
    params = [param for part in model_parts for param in part.parameters()]
    partial = getattr(dims, "pp_enabled", False)  # other stages have parameters, too
    if not partial and not any(param.requires_grad for param in params):
        raise ValueError("no parameter of the model parts is trainable")

    options = fused_options(config)
    deferred = bool(getattr(config, "deferred_clipping", False))
    if process_group is None and options.keys() & ASK_FOR_NORM:
        process_group = _group_of_stages(dims)
    if process_group is not None:
        options["process_group"] = process_group
    if (options or deferred) and not fused:
        named = options.keys() - {"fp32_moments"}  # it comes with state_dtype
        raise ValueError(
            f"{min(named, default='deferred_clipping')} needs implementation 'fused', found "
            f"{config.implementation!r}: torch's optimizers have no such argument"
        )
    if not partial:  # otherwise an option may have an effect on another stage
        reject_ineffective(options, params)
    warn_of_lost_updates(options, params)
    options |= common_arguments(config)
    if not fused or config.name.startswith("Adam"):  # ours have these arguments as torch's do
        options |= {"fused": fused, "foreach": config.implementation == "foreach"}
    backwards = getattr(config, "backwards_per_step", 1)
    choice = choice_of_params(config) | {"partial": partial}
    choice["compat"] = getattr(config, "compat", None)
    arguments = model_parts, classes[config.name], options
    if in_backward:
        if deferred:
            raise ValueError(
                "deferred_clipping clips after backward, but early_step_in_backward has made the "
                "update by then: set max_grad_norm instead"
            )
        if "write_back_gradients" in options:
            raise ValueError(
                "write_back_gradients has no effect with early_step_in_backward, which frees "
                "gradients when they have been used"
            )
        return OptimizersInBackwardContainer(*arguments, backwards_per_step=backwards, **choice)
    if backwards != 1:
        raise ValueError("backwards_per_step has no effect without early_step_in_backward")
    container: OptimizersContainer[Any]
    if fault_tolerant:
        # In torchtitan 0.1 the job configuration tells, not the manager.
        section = getattr(first, "fault_tolerance", None)
        every_step = getattr(section, "semi_sync_method", None) is None
        quorum = getattr(ft_manager, "use_async_quorum", every_step)
        container = FTOptimizersContainer(*arguments, ft_manager.manager, quorum, **choice)
    else:
        container = OptimizersContainer(*arguments, **choice)
    if deferred:
        defer_clipping(container)
    return container


def common_arguments(config: Any) -> dict[str, Any]:
    """Returns a configuration's hyperparameters, which torch's class shares with the fused one.

    Those that it lacks, or has as None, have torchtitan's defaults for Adam, and otherwise those of
    the algorithm. The learning rate is always among them. Muon's is by default that of Adam, which
    its other groups share, as is ``adjust_lr_fn``; what is 0 or False has Muon's default.

    Raises:
        ValueError: a hyperparameter is set that the algorithm does not have.
    """
    algorithm = algorithm_of({"algorithm": config.name.lower()})
    names = {hyper.name for hyper in algorithm.hypers}
    every = {hyper.name for each in ALGORITHMS.values() for hyper in each.hypers}
    matrices = algorithm.steps_matrices
    values = _PRESET if algorithm is ADAM else {"lr": algorithm.defaults["lr"]}
    values = {name: _PRESET[name] for name in ("lr", "weight_decay")} if matrices else values
    for name in sorted(every.difference(_UNCONFIGURED, _OF_ADAMW if matrices else ())):
        value = getattr(config, name, None)
        if value is None or ((matrices or name in DECAY) and not value):
            continue
        if name not in names and value and value != _PRESET.get(name):
            raise ValueError(f"{name} has no effect: {config.name} has no such hyperparameter")
        values = values | {name: value}
    arguments: dict[str, Any] = {}
    for hyper in algorithm.hypers:
        if hyper.name in values:
            value, held = values[hyper.name], arguments.get(hyper.key, ())
            arguments[hyper.key] = value if hyper.index < 0 else (*held, value)
    for name, default in _MATRICES.items():
        value = getattr(config, name, None)
        if matrices and (value not in (None, default) or name == "adjust_lr_fn"):
            arguments[name] = default if value is None else value
        elif value not in (None, default):
            raise ValueError(f"{name} has no effect: {config.name} has no such hyperparameter")
    return arguments


def choice_of_params(config: Any) -> dict[str, Any]:
    """Returns a configuration's arguments of containers that choose among parameters."""
    choice = {
        "no_decay": getattr(config, "no_decay", ()),
        "lr_multipliers": getattr(config, "lr_multipliers", None),
        "muon": getattr(config, "muon", ()),
        "adamw": getattr(config, "adamw", ()),
    }
    if algorithm_of({"algorithm": config.name.lower()}).steps_matrices:
        found = {name: getattr(config, name, None) for name in _OF_ADAMW}
        read = {k: _PRESET[k] if v is None else v for k, v in found.items()}
        betas = read["beta1"], read["beta2"]
        choice["adamw_options"] = {"betas": betas, "eps": read["eps"]}
    return choice


def fused_options(config: Any) -> dict[str, Any]:
    """Returns a configuration's arguments of FusedAdamW, as :func:`read_options`.

    Raises:
        ValueError: an option lacks another, as `rounding_seed` without `stochastic_rounding`.
    """
    options = read_options(config)
    reject_ineffective(options)
    return options


def read_options(config: Any) -> dict[str, Any]:
    """Returns the arguments of FusedAdamW in a configuration or mapping, except unset ones.

    A dtype may be given by its name. The default of `fp32_moments` only counts with 8-bit moments.
    """
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)
    options = {name: value for name in CONFIGURED if (value := read(name, None))}
    if (decay := read("ema_decay", None)) is not None:  # 0.0 keeps averages, too
        options["ema_decay"] = decay
    options.pop("fp32_moments", None)
    for name in ("state_fraction", "offload_step"):
        if options.get(name) == DEFAULTS[name]:
            del options[name]
    if isinstance(dtype := options.get("state_dtype"), str):
        named = getattr(torch, dtype.removeprefix("torch."), None)
        options["state_dtype"] = named if isinstance(named, torch.dtype) else dtype
    eight_bits, chosen = is_8_bit(options.get("state_dtype")), read("fp32_moments", None)
    if chosen is not None and (eight_bits or list(chosen) != list(EMBEDDINGS)):
        options["fp32_moments"] = chosen  # () is a choice, too
    return options


def reject_ineffective(options: Mapping[str, Any], params: Iterable[nn.Parameter] = ()) -> None:
    """Raises ValueError for options without effect on these parameters (:func:`ineffective`)."""
    dtypes = {param.dtype for param in params if param.requires_grad}
    for message in ineffective(options, dtypes).values():
        raise ValueError(message)


def ineffective(
    options: Mapping[str, Any], dtypes: Set[torch.dtype] = frozenset()
) -> dict[str, str]:
    """Returns the options without effect, and says why.

    An option may lack another, or what it needs of the parameters: 16-bit parameters for master
    weights, and for stochastic rounding parameters or moments that are rounded to bfloat16 or int8.

    Args:
        dtypes: of the parameters. Without any it says nothing about them.
    """
    messages = {}
    if options.get("rounding_seed") and not options.get("stochastic_rounding"):
        messages["rounding_seed"] = "rounding_seed has no effect without stochastic_rounding"
    messages |= without_host(options)
    if "fp32_moments" in options and not is_8_bit(options.get("state_dtype")):
        messages["fp32_moments"] = (
            "fp32_moments has no effect without state_dtype='int8', found "
            f"{options['fp32_moments']!r}"
        )
    if not dtypes:
        return messages
    params = f"the parameters are {', '.join(sorted(map(str, dtypes)))}"
    master = options.get("master_weights")
    if master and dtypes.isdisjoint(SIXTEEN_BIT if master == "fp32" else {torch.bfloat16}):
        expected = "bfloat16 or float16" if master == "fp32" else "bfloat16"
        messages["master_weights"] = f"master_weights has no effect: {params}, expected {expected}"
    kept = master in ("fp32", "remainder")  # these keep what rounding a weight would lose
    rounded = {options.get("state_dtype")}.union(() if kept else dtypes)
    if options.get("stochastic_rounding") and not rounded & {torch.bfloat16, torch.int8}:
        messages["stochastic_rounding"] = (
            f"stochastic_rounding has no effect: {params}, and nothing else is rounded to bfloat16"
        )
    return messages


def warn_of_lost_updates(options: Mapping[str, Any], params: Iterable[nn.Parameter]) -> None:
    """Logs a warning if 16-bit weights are rounded to nearest, which loses small updates."""
    dtypes = {param.dtype for param in params if param.requires_grad}
    lossy = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes.intersection(SIXTEEN_BIT))
    if lossy and not options.get("master_weights") and not options.get("stochastic_rounding"):
        logger.warning(
            "Parameters are %s, without master weights or stochastic rounding: updates that are "
            "small beside a weight are lost. Set master_weights, with implementation 'fused' "
            "(docs/memory.md).",
            " and ".join(lossy),
        )


def reject_ineffective_without_norm(options: Mapping[str, Any], *, deferred: bool) -> None:
    """Rejects what needs clipping or a norm if steps have none, for jobs without gradient scaler.

    Args:
        options: FusedAdamW's arguments.
        deferred: the step clips by deferred clipping.

    Raises:
        ValueError: `write_back_gradients` would have no effect.
    """
    if options.get("write_back_gradients") and not (deferred or options.get("max_grad_norm")):
        raise ValueError(
            "write_back_gradients has no effect where the step does not clip: set "
            "deferred_clipping or max_grad_norm"
        )


def _of_job_config(job_config: Any, ft_manager: Any = None) -> tuple[Any, Any, Any]:
    parallelism = getattr(job_config, "parallelism", None)
    stages = getattr(parallelism, "pipeline_parallel_degree", 1)
    dims = SimpleNamespace(pp_enabled=stages > 1, ep_enabled=False)
    return job_config.optimizer, dims, ft_manager


def _of_optimizer_config(
    optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> tuple[Any, Any, Any]:
    return optimizer_config, parallel_dims, ft_manager


def _group_of_stages(dims: Any) -> Any:
    """Returns the group that shares norm and skip decision if there are pipeline stages."""
    if not dims.pp_enabled:
        return None
    if hasattr(dims, "get_mesh"):  # from torchtitan 0.2.1 on
        return dims.get_mesh("pp").get_group()
    if hasattr(dims, "world_mesh"):
        return dims.world_mesh["pp"].get_group()
    raise ValueError(
        "max_grad_norm and skip_nonfinite need one decision of all pipeline stages, but a job "
        "configuration has no mesh: pass process_group=, the group of the stages"
    )
