"""Values of a checkpoint load as they were saved, or are rejected before it is written."""

from collections import Counter, OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from torchopt_ext.trainer import saved_values

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(3.5), 3.5),
        ({"a": (np.int64(1), None)}, {"a": (1, None)}),
        ([np.bool_(True), [np.str_("x")]], [True, ["x"]]),
        (Counter(a=np.int64(2)), Counter(a=2)),
        (OrderedDict(a=1, b={1, 2}), OrderedDict(a=1, b={1, 2})),
    ],
)
def test_numbers_of_numpy_become_pythons(value: Any, expected: Any) -> None:
    found = saved_values.divided(value, "state")
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.arange(3), r"^state is a numpy\.ndarray"),
        ([0, {"at": Path("x")}], r"^state\.1\.at is a pathlib\.\w+, .* expected plain values"),
        ({"call": lambda: None}, r"^state\.call is a builtins\.function"),
        ({"raw": b""}, r"^state\.raw is a builtins\.bytes"),
        ((UserDict(a=1),), r"^state\.0 is a collections\.UserDict"),
        ({0: defaultdict(int)}, r"^state\.0 is a collections\.defaultdict"),
        ({0: {np.int64(1): 2}}, r"^the key .* of state\.0 is a numpy\.int64"),
    ],
)
def test_what_cannot_be_loaded_again_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        saved_values.divided(value, "state")


def test_no_rank_saves_its_part_of_a_tensor_for_all() -> None:
    part = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    assert saved_values.divided({"a": {"b": part}}, "state") == {"a": {"b": part}}
    with pytest.raises(TypeError, match=r"^state\.0\.b is a DTensor inside"):
        saved_values.divided({0: {"b": part}}, "state")


def test_an_optimizers_dicts_have_texts_as_keys() -> None:
    """Keys are strings except parameter indices, which statedict.dcp.load restores as numbers."""
    kept = {"state": {0: {"step": {"a": 1}}}, "param_groups": [{"params": [0]}]}
    assert saved_values.divided(kept, "optimizer", strict=True) == kept
    state = {"state.w.factors": {0: 1}}
    with pytest.raises(TypeError, match=r"^optimizer\.state\.w\.factors has the key 0, expected"):
        saved_values.divided(state, "optimizer", strict=True)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_lack_of_memory_says_nothing_about_a_state(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("no room")

    data = saved_values.packed({1, 2})
    for owner, name in (torch, "load"), (torch, "save"):
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(error, match="no room"):
            saved_values.divided({1, 2}, "state")
        with pytest.raises(error, match="no room"):
            saved_values.unpacked(data, "state")


@pytest.mark.parametrize("value", [("text", 3), {"a": ("text", {"b": 1})}, [("x", [1, 2])]])
def test_tuples_of_a_text_and_a_value_come_back(value: Any) -> None:
    """The form of a value that is saved whole is such a tuple, too."""
    assert saved_values.restored(saved_values.divided(value, "state")) == value
    assert saved_values.restored(saved_values.undivided(value, "state")) == value
