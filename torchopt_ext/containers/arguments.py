"""What a container gives its optimizers: parameters of model parts, and arguments for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchopt_ext.optim import FusedMuon, FusedOptimizer
from torchopt_ext.optim.embeddings import embeddings_of
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.state.entries import unwrapped


def trainable_parameters(model_parts: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Returns each part's trainable parameters, each once. Rejects meta and shared parameters."""
    if isinstance(model_parts, nn.Module):
        raise TypeError(
            f"model_parts is of type {type(model_parts).__name__}, expected a list of modules"
        )
    owner: dict[nn.Parameter, str] = {}
    params: list[list[nn.Parameter]] = []
    for i, part in enumerate(model_parts):
        if not isinstance(part, nn.Module):
            raise TypeError(f"model part {i} is of type {type(part).__name__}, expected a module")
        named = [(name, param) for name, param in part.named_parameters() if param.requires_grad]
        for name, param in named:
            text = f"'{name}' of model part {i}"
            if param in owner:
                raise ValueError(
                    f"parameter {text} is also {owner[param]}: two optimizers would step it"
                )
            if param.is_meta:
                raise ValueError(
                    f"parameter {text} is on the meta device: give it storage "
                    "(module.to_empty(device=...)) before building its optimizer"
                )
            owner[param] = text
        params.append([param for _, param in named])
    return params


def with_fp32_moments(
    arguments: Mapping[str, Any], model_parts: Sequence[nn.Module], *, partial: bool = False
) -> dict[str, Any]:
    """Returns a fused optimizer's arguments, in which the chosen parameters replace `fp32_moments`.

    It changes nothing without 8-bit moments. Patterns are searched for in names without wrappers.

    Args:
        partial: other ranks have other parts.

    Raises:
        TypeError, ValueError: as FusedOptimizer.
    """
    if not is_8_bit(arguments.get("state_dtype")):
        return dict(arguments)
    named = [
        (unwrapped(name), param)
        for part in model_parts
        for name, param in part.named_parameters(remove_duplicate=False)
    ]
    embeddings = embeddings_of(module for part in model_parts for module in part.modules())
    chosen = arguments.get("fp32_moments", EMBEDDINGS)
    return {**arguments, "fp32_moments": fp32_params(named, chosen, embeddings, partial=partial)}


def own_fp32_moments(arguments: dict[str, Any], params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Restricts the result of :func:`with_fp32_moments` to an optimizer's own parameters."""
    chosen = arguments.get("fp32_moments")
    if not isinstance(chosen, frozenset):
        return arguments
    return {**arguments, "fp32_moments": [param for param in params if param in chosen]}


def steps_matrices(optimizer_cls: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a class with these arguments steps groups by Muon that say nothing else."""
    optimizer_cls = arguments.get("optimizer_class", optimizer_cls)  # ZeRO's
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, FusedOptimizer)):
        return False
    return issubclass(optimizer_cls, FusedMuon) or arguments.get("algorithm") in ("muon", "normuon")
