"""Values of a checkpoint: they load as they were saved, or are rejected before it is written."""

from collections import Counter, OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchopt_ext.trainer import saved_values
from torchopt_ext.trainer.checkpoint_states import DataPosition
from torchopt_ext.trainer.checkpoint_writer import Staged
from torchopt_ext.zero.state_shard import StateShard

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
    saved = saved_values.divided(value, "state")
    assert type(saved) is type(expected)
    assert repr(saved) == repr(expected)


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


def test_the_data_position_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing must not read the state again, which would delay the training thread."""
    state = {"dp_rank_0": {"buffer": [*range(9)], 1: (b"x", torch.ones(2), OrderedDict(a=None))}}
    data: Any = type("Data", (), {"state_dict": lambda _: state})()
    with monkeypatch.context() as context:
        context.delattr(torch, "load")
        packed = DataPosition(data).state_dict()
    unpacked = saved_values.unpacked(packed["dp_rank_0"], "state")
    assert repr(unpacked) == repr(state["dp_rank_0"])


def test_a_copy_for_an_asynchronous_save_stays_as_the_state_was() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))
    tensors: dict[str, Any] = {
        "view": whole.clone()[:, 1:3],
        "transposed": torch.nn.Parameter(whole.clone().t()),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 2),
        "placed": distribute_tensor(whole.clone(), init_device_mesh("cpu", (1,)), [Shard(0)]),
        "divided": StateShard((3, 4), [whole.clone()], [chunk]),
    }
    plain: dict[Any, Any] = {0: (0.9, 0.95), "list": [1, [None, "a"]], "bytes": b"\0"}
    ordered = OrderedDict(a=[1])
    staged = Staged({"tensors": tensors, "plain": plain, "ordered": ordered}, pinned=False)
    expected = {key: getattr(t, "shards", [t])[0].detach().clone() for key, t in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            for part in getattr(tensor, "shards", [tensor]):
                part.add_(1)
    plain["list"][1].append(2)
    ordered["a"].append(2)

    staged.wait()
    copy = staged.result()
    assert copy["plain"] == {0: (0.9, 0.95), "list": [1, [None, "a"]], "bytes": b"\0"}
    assert copy["ordered"] == OrderedDict(a=[1])
    for key, copied in copy["tensors"].items():
        assert torch.equal(getattr(copied, "shards", [copied])[0], expected[key]), key
        assert copied.stride() == tensors[key].stride() or key == "view"
        assert not copied.requires_grad
    assert isinstance(copy["tensors"]["placed"], DTensor)
    assert copy["tensors"]["placed"].placements == (Shard(0),)
    assert copy["tensors"]["divided"].chunks == [chunk]
