"""Loading any optimizer whole, or not at all."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_whole(optim: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a copy of ``state_dict``; whatever the optimizer raises, it is then as it was.

    torch's classes may raise after they have taken part of a dict, and share tensors with it.

    Raises:
        ValueError: the groups lack what the optimizer needs, or state holds itself.
    """
    state, groups = optim.state, optim.param_groups
    contents = [dict(group) for group in groups]
    try:
        optim.load_state_dict({**state_dict, "state": own_memory(state_dict["state"])})
        for number, (group, before) in enumerate(zip(optim.param_groups, contents, strict=True)):
            if lacking := (optim.defaults.keys() & before.keys()) - group.keys():
                raise ValueError(
                    f"group {number} of the state dict lacks {', '.join(sorted(lacking))}, which "
                    f"{type(optim).__name__} needs: it is another optimizer's"
                )
    except Exception:
        optim.state, optim.param_groups = state, groups
        for group, content in zip(groups, contents, strict=True):
            group.clear()
            group.update(content)
        raise


def own_memory(value: Any, depth: int = 0) -> Any:
    """A copy of nested state that shares no tensor with it.

    Raises:
        ValueError: it is nested without an end.
    """
    if depth > 64:
        raise ValueError("a state entry holds itself, or is nested more than 64 deep")
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: own_memory(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own_memory(item, depth + 1) for item in value)
    return value
